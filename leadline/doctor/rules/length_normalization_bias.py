from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    reward_rises,
)
from leadline.doctor.view import View


class LengthNormalizationBias(Rule):
    """Dividing each completion's loss by its own length makes long wrong answers cheap.

    ## Symptom
    Completions, above all wrong ones, grow without any gain in reward; a loss that averages within each sequence.

    ## Cause
    With a mean per sequence, the tokens of a long wrong completion are punished less than those of a short one, so wrong
    answers get longer.

    ## Fix
    Aggregate over tokens or by a constant: `objective.loss` "dr_grpo" or "dapo" (verl: loss_agg_mode token-mean or
    seq-mean-token-sum-norm).

    ## References
    Liu et al. 2025, Dr. GRPO (arXiv 2503.20783); huggingface/trl pull 3138. Length up by half without a gain in reward over 20
    rows: leadline's choice, and only a possibility, since longer reasoning can look the same.
    """

    id = "LL211"
    name = "length-normalization-bias"
    severity = "warning"
    needs = ("rollout/length_mean", "reward/mean")
    explains = ("truncation-rate-high-unresolved",)
    confirm = "Plot the length of right and of wrong completions apart."
    sick = (
        RunLog.from_columns(
            {"rollout/length_mean": [200.0 + 10 * i for i in range(30)], "reward/mean": [0.3] * 30},
            {"objective": {"aggregation": "sequence_mean"}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {
                "rollout/length_mean": [200.0 + 10 * i for i in range(30)],
                "reward/mean": [0.3 + 0.01 * i for i in range(30)],
            },
            {"objective": {"aggregation": "sequence_mean"}},
        ),
        RunLog.from_columns(
            {"rollout/length_mean": [200.0 + 10 * i for i in range(30)], "reward/mean": [0.3] * 30},
            {"objective": {"loss": "dapo"}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        length, reward = run["rollout/length_mean"].finite, run["reward/mean"].finite
        grows = len(length) >= TREND and length.rises(0.5 * length.early)
        if not grows or reward_rises(run) or not self._per_sequence(run):
            return []
        note = f"Completions grew from {number(length.early)} to {{value}} tokens while the reward did not rise"
        note += f" ({number(reward.early)} to {number(reward.late)})."
        return [run.fact(length, length.late, 1.5 * length.early, note, since=int(length.steps[0]))]

    def forbids(self, run: View) -> list[Evidence]:
        loss = str(run.setting("objective.loss", "")).lower()
        if run.setting("objective.aggregation") in ("token_mean", "constant") or loss in ("dapo", "dr_grpo", "cispo"):
            return [
                Evidence(
                    "objective.loss",
                    0,
                    1.0,
                    0.0,
                    f"The loss ({loss or 'by tokens'}) does not divide by the length of each completion.",
                )
            ]
        return []

    @staticmethod
    def _per_sequence(run: View) -> bool:
        if run.setting("objective.aggregation") == "sequence_mean" or run.setting("objective.loss") == "grpo":
            return True
        return run.says(r"sequence.*(normali|mean)|seq-mean-token-mean|loss_type\W*= grpo") is not None
