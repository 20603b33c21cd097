"""One function of tensors, examined: adapted, compared, named, and taken to the edges."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from leadline.errors import ConfigError
from leadline.probes.code.batch import seeded_batches
from leadline.probes.code.binding import Binding, bind
from leadline.probes.code.checks import (
    changed_inputs,
    edge_findings,
    layout_findings,
    leaking_gradients,
    precision_facts,
    precision_findings,
)
from leadline.probes.code.edges import EDGES
from leadline.probes.code.explain import Attempt, Explained, attempt, expecting, explain
from leadline.probes.code.findings import Finding, Report, sentence
from leadline.probes.code.layouts import Layout
from leadline.probes.code.load import where
from leadline.probes.code.mutations import TENSOR_MUTATIONS

NEEDED = {
    "loss": ("logprobs", "advantages"),
    "kl": ("logprobs", "ref_logprobs"),
    "logprobs": ("logits", "token_ids"),
    "importance": ("old_logprobs", "rollout_logprobs"),
    "advantages": ("rewards",),
}
"""Without these a function is none of its role."""

SAME_AS = {"rewards": ("token_rewards",), "advantages": ("advantages_by_completion", "advantages_by_token")}

IN_PLACE = "modified by an inplace operation"


def examine(
    function: Callable[..., Any], role: str, target: str, given: Sequence[str] = (), expect: str | None = None
) -> Report:
    """The report on one function of tensors. `given` are `--arg` words; `expect` the variant it should be.

    Raises ConfigError: it could not be called, or `expect` is no variant.
    """
    binding = bind(function, role, given)
    _check_quantities(binding)
    batches = seeded_batches(interleaved=_interleaved(binding))
    attempts = [attempt(binding, layout, batches) for layout in binding.layouts]
    working = _plausible([one for one in attempts if one.error is None], role)
    if not working:
        return _broken(binding, target, attempts[0], _where_it_works(binding, attempts, role))
    explained = explain(expecting(working, expect) if expect else working, TENSOR_MUTATIONS[role])
    findings = [
        *_named(explained),
        *layout_findings(explained, attempts, role),
        *precision_findings(explained, role),
        *edge_findings(explained, role),
        *leaking_gradients(explained, binding),
        *changed_inputs(explained, binding),
    ]
    match = explained.matches[0] if explained.matches else None
    facts = {"compared on": f"{len(batches)} seeded ragged batches, {len(EDGES[role])} at the edges"}
    return Report(
        target=target,
        role=role,
        place=where(function),
        adaptation=_adaptation(binding, explained.attempt.layout),
        verdict=verdict(explained),
        findings=findings,
        matches=match.variant.title if match else None,
        mutations=[mutation.name for mutation in match.mutations] if match else (),
        facts=facts | precision_facts(explained, role),
    )


def _plausible(attempts: Sequence[Attempt], role: str) -> list[Attempt]:
    """All; of logprobs not on one axis if it also runs on three: on two, a gather along the wrong axis is right."""
    several = [one for one in attempts if not one.layout.flat]
    return several if role == "logprobs" and several else [*attempts]


def _check_quantities(binding: Binding) -> None:
    missing = [
        needed
        for needed in NEEDED[binding.role]
        if not {needed, "config", *SAME_AS.get(needed, ())} & binding.quantities
    ]
    if missing:
        names = ", ".join(parameter.name for parameter in binding.parameters) or "none"
        raise ConfigError(
            f"--as is {binding.role}, but no parameter of the function is known to be {' or '.join(missing)} "
            f"(understood: {names}). It could not be compared. Choose another role, or say which parameter it is: "
            f"--arg NAME={missing[0]}."
        )


def _interleaved(binding: Binding) -> bool:
    """A function that is told the groups must not rely on their order and size."""
    return (
        bool({"group_of_completion", "group_labels"} & binding.quantities)
        and not {
            "group_size",
            "config",
        }
        & binding.quantities
    )


def _adaptation(binding: Binding, layout: Layout) -> list[str]:
    meanings = [f"{p.name} = {p.quantity or repr(p.value)}" for p in binding.parameters]
    return [f"{binding.style} signature: {', '.join(meanings)}", layout.words]


def verdict(explained: Explained) -> str:
    """One sentence: what it matches."""
    if not explained.matches:
        return "Matches no known variant, nor one with one or two known mistakes."
    match = explained.matches[0]
    title = match.variant.title
    if explained.scale is not None:
        return f"Matches {title} times {explained.scale:.6g}."
    if not match.mutations:
        return f"Matches {title}."
    return f"Matches {title} with {' and '.join(mutation.phrase for mutation in match.mutations)}."


def _named(explained: Explained) -> Iterator[Finding]:
    if not explained.matches:
        yield Finding(
            "error",
            "unknown_difference",
            "It differs from every variant, and no known mistake explains it",
            "What it optimises is not one of the known objectives.",
            "If it is meant to be one, say which (--expect NAME) and check its constants; else read on for what holds "
            "at the edges.",
        )
        return
    if explained.scale is not None:
        yield Finding(
            "error",
            "scaled",
            f"Everything is {explained.scale:.6g} times what it should be",
            "The learning rate (or beta) no longer means what it says.",
            "Look for a division by the group size or the accumulation steps that is done elsewhere too.",
        )
    alternatives = [match.mutations[0].name for match in explained.matches[1:] if match.mutations]
    for mutation in explained.matches[0].mutations:
        evidence = f"on these batches the same as {', '.join(alternatives)}" if alternatives else ""
        yield Finding("error", mutation.name, sentence(mutation.phrase), mutation.consequence, mutation.fix, evidence)


def _where_it_works(binding: Binding, attempts: Sequence[Attempt], role: str) -> list[Finding]:
    """What is wrong on those batches on which it does not raise: a wrong broadcast, say, on a square one."""
    for one in attempts:
        works = [batch for batch, outcome in zip(one.batches, one.outcomes, strict=True) if outcome.error is None]
        if works:
            explained = explain([attempt(binding, one.layout, works)], TENSOR_MUTATIONS[role])
            return list(_named(explained)) if explained.matches else []
    return []


def _broken(binding: Binding, target: str, one: Attempt, named: Sequence[Finding]) -> Report:
    """It raised on an ordinary batch, in every layout; `named` is what was recognised where it did not."""
    error = one.error or ""
    if IN_PLACE in error:
        finding = Finding(
            "error",
            "in_place_on_graph",
            "An in-place operation on a tensor that backward needs",
            "backward raises: no step is made.",
            "Replace tensor[mask] = 0 and tensor.mul_() with torch.where(mask, tensor, 0).",
            error[:200],
        )
        words = "Cannot be differentiated."
    else:
        finding = Finding(
            "error",
            "raises",
            "It raises on an ordinary batch",
            "Nothing can be trained with it, or its parameters mean something else than their names say.",
            "Check how it was called (above); say otherwise with --arg NAME=QUANTITY.",
            error[:300],
        )
        words = "Could not be compared."
    findings = [*named, finding]
    mutations = [finding.name for finding in named]
    place, adaptation = where(binding.function), _adaptation(binding, one.layout)
    return Report(target, binding.role, place, adaptation, words, findings, mutations=mutations)
