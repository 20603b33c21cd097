"""What a function of tensors does: which variant, mutated how, reproduces it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from leadline.errors import ConfigError
from leadline.probes.code import advantages, importance, kl, logprobs, loss
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.binding import Binding
from leadline.probes.code.layouts import Layout
from leadline.probes.code.outcome import Outcome, measure, same, same_values, value
from leadline.probes.code.search import Comparison, Match, Mutation, Variant, exact, pair, single

TRAINED = {"loss": "logprobs", "kl": "logprobs", "logprobs": "logits"}
"""What a gradient is taken with respect to; the other roles give constants."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The function called in one layout on all batches."""

    layout: Layout
    function: Callable[[ProbeBatch], Tensor]
    batches: Sequence[ProbeBatch]
    outcomes: Sequence[Outcome]
    variants: Sequence[Variant]
    comparison: Comparison

    @property
    def error(self) -> str | None:
        """What it raised on an ordinary batch."""
        return next((outcome.error for outcome in self.outcomes if outcome.error), None)


@dataclass(frozen=True, slots=True)
class Explained:
    """What the function does, in its best layout."""

    attempt: Attempt
    matches: Sequence[Match] = ()
    """One, or several mutations that these batches cannot tell apart; none: unknown."""
    scale: float | None = None
    """It is this many times the match."""

    @property
    def steps(self) -> Any | None:
        """What reproduces the function."""
        return self.matches[0].steps if self.matches else None


def attempt(binding: Binding, layout: Layout, batches: Sequence[ProbeBatch]) -> Attempt:
    """The user's function, called on every batch."""

    def variants(values: Tensor) -> Sequence[Variant]:
        return _variants(binding, values, batches[0])

    return attempt_of(binding.on(layout), layout, TRAINED.get(binding.role), batches, variants)


def attempt_of(
    function: Callable[[ProbeBatch], Tensor],
    layout: Layout,
    trained: str | None,
    batches: Sequence[ProbeBatch],
    variants: Callable[[Tensor], Sequence[Variant]],
) -> Attempt:
    """A function called on every batch; `variants` are chosen by what it returned for the first."""
    outcomes = [measure(function, batch, trained) for batch in batches]
    first = outcomes[0]

    def quick(steps: Any) -> bool:
        return same_values(first, value(steps, batches[0]))

    def full(steps: Any) -> bool:
        return all(same(o, measure(steps, batch, trained)) for o, batch in zip(outcomes, batches, strict=True))

    known = [] if first.values is None else variants(first.values)
    return Attempt(layout, function, batches, outcomes, known, Comparison(quick, full))


def explain(attempts: Sequence[Attempt], mutations: Sequence[Mutation]) -> Explained:
    """The simplest explanation in any layout: a variant, a mutation, a factor, a pair of mutations; or none."""
    simple = explain_simply(attempts, mutations)
    if simple.matches:
        return simple
    for one in attempts:
        if match := pair(one.variants, mutations, one.comparison):
            return Explained(one, [match])
    return simple


def explain_simply(attempts: Sequence[Attempt], mutations: Sequence[Mutation]) -> Explained:
    """As `explain`, without pairs, which take most of its time."""
    for one in attempts:
        if match := exact(one.variants, one.comparison):
            return Explained(one, [match])
    for one in attempts:
        if matches := single(one.variants, mutations, one.comparison):
            return Explained(one, matches)
    for one in attempts:
        if scaled := _scaled(one):
            return scaled
    return Explained(attempts[0])


def expecting(attempts: Sequence[Attempt], name: str) -> list[Attempt]:
    """The attempts with no other variant than `name`. Raises ConfigError: there is none."""
    known = sorted({variant.name for one in attempts for variant in one.variants})
    if name not in known:
        raise ConfigError(
            f"--expect is {name!r}, but the variants of this role that return what the function returns are "
            f"{', '.join(known) or '(none)'}. It could not be compared. Use one of them."
        )
    return [replace(one, variants=[v for v in one.variants if v.name == name and v.rank == 0]) for one in attempts]


def _variants(binding: Binding, values: Tensor, batch: ProbeBatch) -> Sequence[Variant]:
    settings, one, by_completion = binding.settings, values.numel() == 1, values.numel() == batch.shape[0]
    if binding.role == "loss":
        return loss.variants(settings, aggregated=one, weighted="rollout_weights" in binding.quantities)
    if binding.role == "kl":
        return kl.variants(settings, aggregated=one)
    if binding.role == "logprobs":
        return logprobs.variants(settings, per_token=not by_completion)
    if binding.role == "importance":
        return importance.variants(settings, per_token=not by_completion)
    return advantages.variants(settings)


def _scaled(one: Attempt) -> Explained | None:
    """A variant times a constant, values and gradient."""
    first = one.outcomes[0].values
    for variant in one.variants:
        reference = value(variant.steps, one.batches[0]).values
        if first is None or reference is None or reference.shape != first.shape:
            continue
        at = int(reference.abs().argmax())
        scale = float(first[at] / reference[at])
        steps = _times(variant.steps, scale)
        if abs(scale) > 1e-9 and one.comparison.same(steps):
            return Explained(one, [Match(variant, steps)], scale)
    return None


def _times(steps: Callable[[ProbeBatch], Tensor], scale: float) -> Callable[[ProbeBatch], Tensor]:
    return lambda batch: scale * steps(batch)
