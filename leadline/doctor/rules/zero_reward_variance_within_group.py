from leadline.doctor.rule import PERSISTENT, Evidence, Rule, percent, when
from leadline.doctor.run_log import RunLog, above


class ZeroRewardVarianceWithinGroup(Rule):
    """Most groups have equal rewards, so they teach nothing.

    ## Symptom
    Loss and gradient norm are near zero, the reward curve is flat, and `rollout/zero_signal_fraction` is above 0.8.
    The reward's std over all rollouts may still look healthy: it also counts the difference between prompts.

    ## Cause
    An advantage compares a completion with the others of its group. When all rewards of a group are equal, every
    advantage is zero. At the lowest reward: the task is too hard, or the reward cannot parse the completions. At the
    highest: the data is solved. With two to four rollouts in a group, a 0/1 reward often agrees by chance.

    ## Fix
    Look at `rollouts/`: if right answers get no reward, mend the reward or the answer format; if all are right or
    all wrong, choose data of another difficulty. A larger `rollout.group_size` or `rollout.refill` above 0 finds more
    groups that disagree.

    ## References
    Yu et al. 2025, DAPO (arXiv 2503.14476), dynamic sampling. huggingface/trl issue 3857. The limit of 0.8 over three
    steps is leadline's choice: below it a step still learns from a fifth of what it sampled.
    """

    id = "LL101"
    name = "zero-reward-variance-within-group"
    severity = "warning"
    needs = ("rollout/zero_signal_fraction",)
    sick = (
        RunLog.from_columns({"rollout/zero_signal_fraction": [1.0, 1.0, 1.0]}),
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.2, 0.875, 0.875, 1.0]}),
    )
    healthy = (
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.5, 0.8, 0.8, 0.8, 0.25]}),
        RunLog.from_columns({"rollout/zero_signal_fraction": [1.0, 0.9, 0.5, 0.9, 1.0]}),
    )
    limit = 0.8

    def examine(self, run: RunLog) -> list[Evidence]:
        name = "rollout/zero_signal_fraction"
        return [
            Evidence(
                name,
                streak.last,
                streak.value,
                self.limit,
                f"{percent(streak.value)} of the groups had no advantage {when(streak)}; "
                f"more than {percent(self.limit)} is too many.",
            )
            for streak in run.streaks(name, above(self.limit), PERSISTENT)
        ]
