"""Which known variant, mutation, or pair of mutations reproduces what a function does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A correct form of the equation.

    Example:
        Variant("dapo", "clip 0.2 / 0.28", steps)
    """

    name: str
    detail: str
    steps: Any
    """A frozen dataclass of exchangeable steps, callable on a batch (or a case)."""
    rank: int = 0
    """0: what people mean by the name, where single mutations and pairs are searched; 1: another form, where single
    mutations are searched; 2: a rare constant, which is only recognised as it is."""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug: a change of one step of the reference.

    Example:
        Mutation("sign_flipped", "the loss negated", "It unlearns ...", "Minimise -min(...)", (negated,))
    """

    name: str
    phrase: str
    """Completes "matches grpo with ..."."""
    consequence: str
    fix: str
    changes: tuple[Callable[[Any], Any], ...]
    """Each a way in which the bug is written: steps -> changed steps."""


@dataclass(frozen=True, slots=True)
class Match:
    """A variant under none, one or two mutations that gives the same as the function."""

    variant: Variant
    steps: Any
    """Of the variant, mutated."""
    mutations: tuple[Mutation, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """How candidates are compared with the function: on all batches, and a quick first look that rules most out."""

    quick: Callable[[Any], bool]
    full: Callable[[Any], bool]

    def same(self, steps: Any) -> bool:
        return self.quick(steps) and self.full(steps)


def exact(variants: Sequence[Variant], comparison: Comparison) -> Match | None:
    """The first variant that gives the same."""
    return next((Match(variant, variant.steps) for variant in variants if comparison.same(variant.steps)), None)


def single(variants: Sequence[Variant], mutations: Sequence[Mutation], comparison: Comparison) -> list[Match]:
    """The mutations that alone give the same, in variants of rank 0, else 1; one match for each, likeliest first."""
    for rank in (0, 1):
        some = [variant for variant in variants if variant.rank == rank]
        found = {m.mutations[0].name: m for m in reversed(list(_singles(some, mutations, comparison)))}
        if found:
            return [found[mutation.name] for mutation in mutations if mutation.name in found]
    return []


def pair(variants: Sequence[Variant], mutations: Sequence[Mutation], comparison: Comparison) -> Match | None:
    """The first two mutations of different steps of a variant of rank 0 that together give the same."""
    for variant in (v for v in variants if v.rank == 0):
        changed = [(m, steps) for m in mutations for change in m.changes if (steps := _changed(change, variant.steps))]
        for (one, first), (other, second) in combinations(changed, 2):
            steps = _both(variant.steps, first, second)
            if steps is not None and comparison.same(steps):
                return Match(variant, steps, (one, other))
    return None


def _singles(variants: Sequence[Variant], mutations: Sequence[Mutation], comparison: Comparison) -> Iterator[Match]:
    for variant in variants:
        for mutation in mutations:
            changed = (_changed(change, variant.steps) for change in mutation.changes)
            steps = next((steps for steps in changed if steps is not None and comparison.same(steps)), None)
            if steps is not None:
                yield Match(variant, steps, (mutation,))


def _changed(change: Callable[[Any], Any], steps: Any) -> Any | None:
    """The changed steps; None where the change does not apply to this variant."""
    changed = change(steps)
    return None if changed is steps else changed


def _both(original: Any, first: Any, second: Any) -> Any | None:
    """Both changes at once; None if they change the same step."""
    values = {}
    for field in fields(original):
        before, one, two = (getattr(steps, field.name) for steps in (original, first, second))
        if one is not before and two is not before:
            return None
        values[field.name] = one if one is not before else two
    return type(original)(**values)
