"""Which zero do you have: symptoms that many causes share, how each is seen, and the causes that come into question.

For each symptom that a run shows, the report names the causes that a fact of the log rules out, and that fact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from leadline.doctor.report import RuledOut
from leadline.doctor.rule import Rule
from leadline.doctor.series import Series
from leadline.doctor.signals import ENTROPY, GAP, GRAD, KL, WEIGHT, at_cap
from leadline.doctor.view import View


@dataclass(frozen=True, slots=True)
class Symptom:
    """Example: Symptom("loss 0", shown=..., causes=("zero-reward-variance-within-group", ...))."""

    name: str
    shown: Callable[[View], bool]
    causes: tuple[str, ...]


def _mostly(series: Series, broken: Callable[[np.ndarray], np.ndarray]) -> bool:
    values = series.known.values
    return bool(len(values)) and float(np.mean(broken(values))) >= 0.5


NO_UPDATE = (
    "zero-reward-variance-within-group",
    "truncation-cap-too-small",
    "near-greedy-sampling",
    "absorbing-state-at-length-cap",
    "all-completions-masked",
    "importance-correction-erases-signal",
    "sequence-is-sum-deflates-gradient",
    "clip-range-too-narrow",
    "nan-reward-poisons-advantage",
    "nan-poisoned-weights",
    "fp16-overflow",
    "eos-fill-mask-error",
    "lora-grad-not-flowing",
    "ratio-constant-no-policy-gradient",
    "no-update-grad-and-kl-exactly-zero",
    "grad-clip-swallows-update",
    "optimizer-empty-frozen-adapter",
    "advantage-epsilon-dominates",
)
MISMATCH = (
    "logprob-temperature-mismatch",
    "logprob-truncation-support-mismatch",
    "duplicated-bos",
    "retokenization-drift",
    "moe-routing-mismatch",
    "rollout-lora-wrong-output",
    "rollout-lora-not-applied",
    "stale-derived-weight-cache",
    "stale-prefix-cache",
    "rollout-weights-corrupted-on-sync",
    "offpolicy-uncorrected",
    "lora-merge-unmerge-drift-bf16",
    "train-infer-mismatch-collapse",
    "sampling-logprobs-overwritten",
    "rollout-logprob-mismatch",
)

SYMPTOMS: tuple[Symptom, ...] = (
    Symptom("loss is 0", lambda run: _mostly(run["loss"], lambda v: np.abs(v) < 5e-5), NO_UPDATE),
    Symptom("gradient norm is about 0", lambda run: _mostly(run.first_of(*GRAD), lambda v: v < 1e-2), NO_UPDATE),
    Symptom(
        "importance ratio is far from 1",
        lambda run: (
            _mostly(run.first_of(*WEIGHT), lambda v: (v < 0.9) | (v > 1.1))
            or _mostly(run.first_of(*GAP), lambda v: v > 0.05)
        ),
        MISMATCH,
    ),
    Symptom(
        "KL is stuck at 0",
        lambda run: _mostly(run.first_of(*KL), lambda v: np.abs(v) < 1e-7),
        (
            "no-update-grad-and-kl-exactly-zero",
            "reference-not-frozen",
            "learning-rate-too-low-for-lora",
            "beta-mis-scaled",
            "optimizer-empty-frozen-adapter",
            "lora-grad-not-flowing",
        ),
    ),
    Symptom(
        "KL is large",
        lambda run: _mostly(run.first_of(*KL).tail(5), lambda v: v > 1),
        (
            "k3-kl-outlier-explosion",
            "learning-rate-too-high",
            "kl-drift-reward-collapse",
            "reference-model-mismatch",
            "kl-penalty-not-applied",
            "offpolicy-uncorrected",
            "nan-poisoned-weights",
        ),
    ),
    Symptom(
        "KL is negative",
        lambda run: _mostly(run.first_of(*KL), lambda v: v < -1e-3),
        ("negative-kl-sampling-mismatch", "padding-side-wrong", "kl-metric-uses-other-estimator"),
    ),
    Symptom(
        "reward does not vary",
        lambda run: _mostly(run.first_of("reward/group_std", "reward/std"), lambda v: v < 1e-6),
        (
            "truncation-cap-too-small",
            "reward-parse-mismatch",
            "think-tag-prefilled",
            "special-tokens-stripped",
            "near-greedy-sampling",
            "absorbing-state-at-length-cap",
            "group-size-too-small",
            "nan-reward-poisons-advantage",
            "zero-reward-variance-within-group",
        ),
    ),
    Symptom(
        "entropy is low or high",
        lambda run: _mostly(run.first_of(*ENTROPY).tail(5), lambda v: (v < 0.05) | (v > 2)),
        ("entropy-collapse", "entropy-explosion", "near-greedy-sampling", "metric-entropy-misordered"),
    ),
    Symptom(
        "length is pinned at the limit",
        lambda run: len(at_cap(run)) > 0,
        (
            "truncation-cap-too-small",
            "absorbing-state-at-length-cap",
            "eos-suppressed-by-min-length",
            "eos-fill-mask-error",
            "eos-id-mismatch",
            "reward-hacking-nontermination",
            "rollout-weights-corrupted-on-sync",
            "offpolicy-uncorrected",
        ),
    ),
)


def symptoms(run: View) -> list[Symptom]:
    """Those that the run shows."""
    return [symptom for symptom in SYMPTOMS if symptom.shown(run)]


def ruled_out(run: View, rules: Sequence[Rule], forbidden: dict[str, str]) -> tuple[RuledOut, ...]:
    """The causes of the shown symptoms that a fact forbids, with that fact."""
    wanted = {cause for symptom in symptoms(run) for cause in symptom.causes}
    return tuple(
        RuledOut(rule.id, rule.name, rule.title, forbidden[rule.name])
        for rule in rules
        if rule.name in wanted and rule.name in forbidden
    )


def rivals(run: View, name: str) -> set[str]:
    """The other causes of the shown symptoms that this one is a cause of."""
    return {cause for symptom in symptoms(run) if name in symptom.causes for cause in symptom.causes} - {name}
