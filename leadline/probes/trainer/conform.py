"""Each scenario of TRL, explained; and what it does at the edges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from leadline.probes.code.batch import ProbeBatch, seeded_batches
from leadline.probes.code.checks import edge_findings
from leadline.probes.code.examine import verdict
from leadline.probes.code.explain import Attempt, Explained, attempt_of, explain_simply
from leadline.probes.code.findings import Finding, sentence
from leadline.probes.code.layouts import Layout
from leadline.probes.code.mutations import TENSOR_MUTATIONS
from leadline.probes.code.outcome import difference, measure
from leadline.probes.trainer.scenarios import ADVANTAGES, LOSSES, SCENARIOS, WEIGHTS, Scenario
from leadline.probes.trainer.seam import advantages_of, build_trainer, loss_of, weights_of

ROLES = {"loss": "loss", "advantages": "advantages", "weights": "importance"}
FUNCTIONS: dict[str, Any] = {"advantages": advantages_of, "weights": weights_of}


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario.

    Example:
        Row("loss", "dapo, the default", "dapo", "Matches dapo (clip 0.2 / 0.2).", True, 3e-16, 2e-16)
    """

    part: str
    setting: str
    equation: str
    verdict: str
    conforms: bool
    value_difference: float
    """The largest, relative to the equation; infinite where shapes or NaNs differ."""
    gradient_difference: float


@dataclass(frozen=True, slots=True)
class Conformance:
    """The installed trainer against the equations."""

    trainer: str
    """With its version."""
    rows: Sequence[Row]
    edges: Sequence[tuple[str, Finding]]
    """(part, what happens at an edge)."""

    @property
    def departures(self) -> list[Row]:
        return [row for row in self.rows if not row.conforms]

    @property
    def exit_code(self) -> int:
        return 1 if self.departures or any(finding.level == "error" for _, finding in self.edges) else 0


def trl_conformance() -> Conformance:
    """The installed TRL. Its version is in the result. Raises ModuleNotFoundError: it is not installed."""
    # TRL makes float32 of what the engine reports; rounded before, both sides see the same numbers.
    batches = [batch.to(torch.float32).to(torch.float64) for batch in seeded_batches()]
    rows = [_row(scenario, batches) for scenario in SCENARIOS]
    return Conformance(f"TRL {version('trl')}", rows, list(_edges(batches)))


def _row(scenario: Scenario, batches: Sequence[ProbeBatch]) -> Row:
    tried = _attempt(scenario, batches)
    wanted = scenario.variants[0]
    pairs = [
        (outcome, measure(wanted.steps, batch, _trained(scenario)))
        for outcome, batch in zip(tried.outcomes, batches, strict=True)
    ]
    value_difference = max(difference(one.values, other.values) for one, other in pairs)
    gradient_difference = max(difference(one.gradient, other.gradient) for one, other in pairs)
    explained = explain_simply([tried], TENSOR_MUTATIONS[ROLES[scenario.part]])
    conforms = _is(explained, wanted.name) and _same_detail(explained, wanted.detail, scenario.part)
    words = tried.error or verdict(explained)
    if scenario.remark and not conforms:
        words = f"{words if explained.matches else 'Another loss.'} {sentence(scenario.remark)}"
    return Row(scenario.part, scenario.name, scenario.equation, words, conforms, value_difference, gradient_difference)


def _attempt(scenario: Scenario, batches: Sequence[ProbeBatch]) -> Attempt:
    trainer = build_trainer(scenario.settings)
    if scenario.part == "loss":
        function = loss_of(trainer, scenario.micro_batches)
    else:
        function = FUNCTIONS[scenario.part](trainer)
    return attempt_of(function, Layout(""), _trained(scenario), batches, lambda _: scenario.variants)


def _trained(scenario: Scenario) -> str | None:
    return "logprobs" if scenario.part == "loss" else None


def _is(explained: Explained, name: str) -> bool:
    return bool(explained.matches) and not explained.matches[0].mutations and explained.matches[0].variant.name == name


def _same_detail(explained: Explained, detail: str, part: str) -> bool:
    """Of advantages the epsilon is a detail."""
    return part == "advantages" or explained.matches[0].variant.detail == detail


def _edges(batches: Sequence[ProbeBatch]) -> Iterator[tuple[str, Finding]]:
    for scenario in (LOSSES[2], ADVANTAGES[0], WEIGHTS[0]):
        tried = _attempt(scenario, batches)
        for finding in edge_findings(Explained(tried), ROLES[scenario.part]):
            yield scenario.part, finding
    yield from _masked_completion(batches[0])


def _masked_completion(batch: ProbeBatch) -> Iterator[tuple[str, Finding]]:
    """Whether a completion without any trained token still counts in the mean over completions."""
    mask = batch.loss_mask.clone()
    mask[0] = False
    masked = replace(batch, loss_mask=mask)
    without = replace(
        batch,
        **{
            name: getattr(batch, name)[1:]
            for name in (
                "token_ids",
                "logprobs",
                "old_logprobs",
                "ref_logprobs",
                "rollout_weights",
                "loss_mask",
                "advantages",
            )
        },
    )
    for loss_type in ("grpo", "dr_grpo"):
        function = loss_of(build_trainer({"loss_type": loss_type}))
        one, other = measure(function, masked, None).values, measure(function, without, None).values
        if difference(one, other) > 1e-6:
            yield (
                "loss",
                Finding(
                    "note",
                    "masked_completions_counted",
                    f"{loss_type}: a masked completion counts in the denominator",
                    "mask_truncated_completions shrinks the step by the share of truncated completions.",
                    "Divide by the completions that have a trained token.",
                ),
            )
