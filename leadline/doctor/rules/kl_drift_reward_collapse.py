from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    KL,
    reward_falls,
)
from leadline.doctor.view import View


class KlDriftRewardCollapse(Rule):
    """The policy drifts away from the reference until the reward collapses.

    ## Symptom
    The KL grows without bound over hundreds of steps; the reward rises first, then falls; texts degenerate.

    ## Cause
    Nothing holds the policy: a KL coefficient of 0 or next to it, a rate at the upper end, small batches.

    ## Fix
    Go back to the checkpoint with the best reward, raise `objective.beta` (0.001 to 0.04) or lower `optimizer.learning_rate`,
    and enlarge the batch.

    ## References
    huggingface/open-r1 issue 257. A KL above 0.5 that grew over 20 rows, with a reward that fell by a quarter: leadline's choice.
    """

    id = "LL421"
    name = "kl-drift-reward-collapse"
    severity = "error"
    needs = (KL, "reward/mean")
    explains = ("entropy-explosion", "truncation-rate-high-unresolved", "zero-reward-variance-within-group")
    confirm = "Read texts from before and after the fall."
    sick = (
        RunLog.from_columns(
            {
                "kl/k3": [0.02 * i for i in range(100)],
                "reward/mean": [0.3 + 0.01 * i for i in range(50)] + [0.8 - 0.015 * i for i in range(50)],
            }
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"kl/k3": [0.02 * i for i in range(100)], "reward/mean": [0.3 + 0.005 * i for i in range(100)]}
        ),
        RunLog.from_columns({"kl/k3": [0.001 * i for i in range(100)], "reward/mean": [0.5] * 100}),
    )

    def examine(self, run: View) -> list[Evidence]:
        kl, reward = run.first_of(*KL).finite, run["reward/mean"].finite
        if not kl.is_trend or kl.late < 0.5 or not kl.rises(0.3) or not reward_falls(run):
            return []
        return [
            run.fact(kl, kl.late, 0.5, f"The KL drifted from {number(kl.early)} to {{value}}.", since=int(kl.steps[0])),
            run.fact(reward, reward.late, reward.high, f"The reward fell from {number(reward.high)} to {{value}}."),
        ]

    def forbids(self, run: View) -> list[Evidence]:
        kl = run.first_of(*KL).finite
        if len(kl) >= TREND and kl.high < 0.2:
            return [run.fact(kl, kl.high, 0.5, "The KL never exceeds {value}.")]
        return []
