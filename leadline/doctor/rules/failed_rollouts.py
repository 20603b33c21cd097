from leadline.doctor.rule import Evidence, Rule, percent, when
from leadline.doctor.run_log import RunLog, above


class FailedRollouts(Rule):
    """Rollouts fail: their reward raises or times out, or the engine aborts them.

    ## Symptom
    `rollout/failed_fraction` is above 0.05. Groups are smaller than `rollout.group_size`, and what was sampled is lost.

    ## Cause
    The reward raises on completions it did not expect, needs longer than its `timeout_s`, or returns something that is
    not a finite number; or the engine gave up a completion. Completions that fail are rarely a random draw: the policy
    is trained on the rest, which biases it.

    ## Fix
    Read the `error` column of `rollouts/*.parquet`: it holds what was raised. Mend the reward for those completions
    (return 0 or None for what it cannot judge), or raise `timeout_s` of that reward.

    ## References
    The limit of 0.05 is leadline's choice: one failure in twenty is no longer an accident.
    """

    id = "LL102"
    name = "failed-rollouts"
    severity = "warning"
    needs = ("rollout/failed_fraction",)
    sick = (
        RunLog.from_columns({"rollout/failed_fraction": [0.0, 0.125, 0.0]}),
        RunLog.from_columns({"rollout/failed_fraction": [1.0]}),
    )
    healthy = (RunLog.from_columns({"rollout/failed_fraction": [0.0, 0.05, 0.0]}),)
    limit = 0.05

    def examine(self, run: RunLog) -> list[Evidence]:
        name = "rollout/failed_fraction"
        return [
            Evidence(
                name,
                streak.last,
                streak.value,
                self.limit,
                f"{percent(streak.value)} of the rollouts failed {when(streak)}; {percent(self.limit)} is the limit.",
            )
            for streak in run.streaks(name, above(self.limit), 1)
        ]
