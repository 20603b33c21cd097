from collections.abc import Sequence

import numpy as np

from leadline.doctor.rule import Evidence, Rule, Strength, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    token_truncation,
)
from leadline.doctor.signals import (
    GAP,
    WEIGHT,
)
from leadline.doctor.view import View


class SequenceIsSumDeflatesGradient(Rule):
    """The importance weight multiplies over the whole completion, so long completions weigh almost nothing.

    ## Symptom
    The mean importance weight is well below 1 and falls with length, while engine and trainer agree per token (0.01 to 0.05
    nats); the gradient norm is tiny although rewards vary.

    ## Cause
    At the sequence level the log ratios are summed. The variance of the sum grows with length, and a bound on one side only
    pulls the mean down: 0.02 nats over 256 tokens is a factor of 170.

    ## Fix
    Correct per token ({token}) or by the geometric mean over the completion (leadline: `objective.importance_level`
    "geometric"), and keep the completions short enough for a product.

    ## References
    huggingface/trl issue 5814 (0.569 with the sum, 0.993 with the mean, same data) and 7120. Measured on TRL 1.16: an offset of 0.02
    nats at 256 tokens cuts the gradient norm from 0.257 to 0.0015. A weight below 0.85 with a gap below 0.1: leadline's choice.
    """

    id = "LL303"
    name = "sequence-is-sum-deflates-gradient"
    severity = "error"
    needs = (WEIGHT,)
    explains = ("importance-correction-erases-signal", "rollout-logprob-mismatch", "gradient-vanishes", "dead-update")
    sick = (
        RunLog.from_columns({"importance/weight_mean": [0.57] * 3}, {"objective": {"importance_level": "sequence"}}),
        RunLog.from_columns(
            {"importance/weight_mean": [0.004] * 3, "importance/log_ratio_abs_mean": [0.02] * 3},
            {"objective": {"importance_level": "sequence"}},
        ),
    )
    healthy = (
        RunLog.from_columns({"importance/weight_mean": [0.97] * 3}, {"objective": {"importance_level": "sequence"}}),
        RunLog.from_columns({"importance/weight_mean": [0.57] * 3}, {"objective": {"importance_level": "token"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        gap, level = run.first_of(*GAP).finite.median, self._level(run)
        raw = run["importance/sequence_ratio_mean"]
        weight = (run["importance/weight_mean"] if run.has("importance/weight_mean") else raw).finite
        if level not in ("sequence", None) or run.setting("objective.importance_action") == "off" or gap > 0.1:
            return []
        usual = weight.median
        if not usual < 0.85 or (np.isnan(gap) and usual < 0.05):
            return []  # so small with an unknown gap: the gap itself may be large
        certain = level == "sequence"
        strength: Strength = "proof" if certain and gap == gap else "strong" if certain or gap == gap else "weak"
        per_token = "" if np.isnan(gap) else f" while engine and trainer differ by {number(gap)} nats per token"
        note = "The typical weight of a completion is {value}" + per_token + "."
        return [run.fact(weight, usual, 0.85, note, strength, int(weight.steps[0]))]

    @staticmethod
    def _level(run: View) -> str | None:
        """As set; None where it is unknown and the framework's default multiplies (TRL's sequence_mask)."""
        level = run.setting("objective.importance_level")
        if level in ("token", "sequence", "geometric"):
            return str(level)
        if run.says(r"sequence_(mask|truncate)|rollout_is\W*= sequence") or run.has("importance/sequence_ratio_mean"):
            return "sequence"
        return None if run.framework == "trl" else "unknown"

    def forbids(self, run: View) -> list[Evidence]:
        level = run.setting("objective.importance_level")
        if level in ("token", "geometric"):
            return [run.chosen("objective.importance_level", 0, f"The weights are taken per {level}, not multiplied.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        return super().fix(run, evidence).format(token=token_truncation(run))
