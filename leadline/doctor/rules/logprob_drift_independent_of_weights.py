from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP_GROWTH,
)
from leadline.doctor.view import View


class LogprobDriftIndependentOfWeights(Rule):
    """The mismatch grows although the weights do not change.

    ## Symptom
    The gap between engine and trainer rises steadily with a learning rate of 0.

    ## Cause
    Not the optimizer and not the adapter: state of the engine (caches, memory), a drift of prompts or lengths, or numerics
    that depend on them.

    ## Fix
    Restart the engine in mid-run: if the gap drops, it is the engine's state. Otherwise replay the same prompts: if it stays,
    the data drifts.

    ## References
    allenai/open-instruct issue 1473 (rises with learning rate 0; cause not established). A rise by half over 20 rows at learning rate 0.
    """

    id = "LL315"
    name = "logprob-drift-independent-of-weights"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "rollout-lora-not-applied", "offpolicy-uncorrected")
    sick = (
        RunLog.from_columns(
            {
                "importance/log_ratio_abs_mean": [0.01 + 0.001 * i for i in range(30)],
                "optimizer/learning_rate": [0.0] * 30,
            }
        ),
        RunLog([{"step": 450, "optimizer/learning_rate": 0.0, "derail_step": 450}]),
    )
    healthy = (
        RunLog.from_columns(
            {
                "importance/log_ratio_abs_mean": [0.01 + 0.001 * i for i in range(30)],
                "optimizer/learning_rate": [1e-6] * 30,
            }
        ),
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.01] * 30, "optimizer/learning_rate": [0.0] * 30}),
    )

    def examine(self, run: View) -> list[Evidence]:
        rate = run["optimizer/learning_rate"].finite
        still = (len(rate) and rate.high == 0) or run.number("optimizer.learning_rate") == 0
        if not still:
            return []
        gap = run.first_of(*GAP_GROWTH).finite
        if gap.is_trend and gap.rises(0.5 * abs(gap.early)) and gap.late > 0:
            note = f"{gap.name} rose from {number(gap.early)} to {{value}} at a learning rate of 0."
            return [run.fact(gap, gap.late, gap.early, note, "proof", int(gap.steps[0]))]
        return probe.above(
            run, r"derail|diverge|collapse|drift|fail", 0, "{name} is {value} at a learning rate of 0.", "weak"
        )

    def forbids(self, run: View) -> list[Evidence]:
        rate = run["optimizer/learning_rate"].finite
        return (
            [run.fact(rate, rate.median, 0.0, "The learning rate is {value}: the weights change.")]
            if len(rate) and rate.low > 0
            else []
        )
