from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    ZERO_SIGNAL,
)
from leadline.doctor.view import View


class GroupSizeTooSmall(Rule):
    """Groups are too small for their rewards to disagree.

    ## Symptom
    Two to four completions per prompt, most groups without a signal, and a flat reward. With a 0/1 reward and success
    rate p, a share of p^G + (1 - p)^G of the groups agrees by chance: 70 % at p = 0.18 and G = 2.

    ## Cause
    An advantage needs completions of one prompt that differ. With G = 1 there is no baseline at all, and with G = 2 the
    std of two numbers makes every advantage +0.7 or -0.7, whatever the rewards.

    ## Fix
    Set `rollout.group_size` to 8 or more, and lower `rollout.groups_per_step` if the step has to stay as large. A
    graded reward instead of 0/1 helps as well.

    ## References
    The formula is the binomial chance of agreement. jsboige/CoursIA issue 10603 (G = 2: 77 % agreed). Yu et al. 2025, DAPO
    (arXiv 2503.14476). Groups of up to 4 with typically 60 % of them agreeing: leadline's choice of limits.
    """

    id = "LL103"
    name = "group-size-too-small"
    severity = "warning"
    explains = ("zero-reward-variance-within-group",)
    sick = (
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.7] * 4}, {"rollout": {"group_size": 2}}),
        RunLog([], {"rollout": {"group_size": 2}}),
        RunLog([{"step": 1, "num_generations": 2, "frac_homogeneous_groups": 0.77}], {"rollout": {"group_size": 2}}),
    )
    healthy = (
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.7] * 4}, {"rollout": {"group_size": 8}}),
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.1] * 4}, {"rollout": {"group_size": 4}}),
        RunLog([], {"rollout": {"group_size": 16}}),
    )
    largest = 4

    def examine(self, run: View) -> list[Evidence]:
        size = run.number("rollout.group_size")
        if not size <= self.largest:
            return []
        chance = f"with {number(size)} completions each, groups often agree by chance"
        note = "{percent} of the groups had no advantage {when}: " + chance + "."
        zero = run.first_of(*ZERO_SIGNAL)
        found = run.lasting(zero, lambda v: v > 0.6, 0.6, note) if zero.median > 0.6 else []
        note = "{name} was {value}: " + chance + "."
        return found + probe.above(run, r"homogeneous|identical reward|no signal|uninformative", 0.5, note)

    def lint(self, run: View) -> list[Evidence]:
        if not run.number("rollout.group_size") <= 2:
            return []
        return [
            run.chosen("rollout.group_size", 4, "{option} is {value}: an advantage of two is +0.7 or -0.7 or nothing.")
        ]

    def forbids(self, run: View) -> list[Evidence]:
        if run.number("rollout.group_size") > self.largest:
            return [run.chosen("rollout.group_size", self.largest, "{option} is {value}, which is enough.")]
        return []
