import numpy as np

from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    ZERO_SIGNAL,
)
from leadline.doctor.view import View


class AdvantageEpsilonDominates(Rule):
    """The epsilon added to the std swallows the advantages.

    ## Symptom
    Advantages are far smaller than 1 although rewards vary within groups; the loss is flat and the model does not change.

    ## Cause
    The constant that guards against a std of 0 is of the size of the std itself (1e-2 and more), from a typo in the
    exponent or a sweep. An advantage becomes (r - mean) / epsilon.

    ## Fix
    Set `objective.advantage_epsilon` to 1e-6 (1e-4 at most): it is a rounding guard.

    ## References
    Common Pitfalls in RL Post-Training, "epsilon dominates the denominator". 1e-2 is the limit that leadline's config enforces: a
    group's std is often of that size. A mean |advantage| below 0.05 with a within-group std above 1e-3 is not possible with
    a small epsilon: it is 0.6 to 0.9 then.
    """

    id = "LL116"
    name = "advantage-epsilon-dominates"
    severity = "error"
    sick = (
        RunLog([], {"objective": {"advantage_epsilon": 1.0}}),
        RunLog.from_columns({"advantage/abs_mean": [0.02] * 3, "reward/group_std": [0.3] * 3}),
    )
    healthy = (
        RunLog.from_columns({"advantage/abs_mean": [0.7] * 3, "reward/group_std": [0.3] * 3}),
        RunLog.from_columns(
            {"advantage/abs_mean": [0.02] * 3, "reward/group_std": [0.03] * 3},
            {"objective": {"advantage_scaling": "none"}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        steps, size, spread = paired(run["advantage/abs_mean"], run["reward/group_std"])
        unscaled = run.setting("objective.advantage_scaling") in ("none", "leave_one_out", "batch_std")
        zero = run.first_of(*ZERO_SIGNAL).finite
        if not len(steps) or unscaled or (len(zero) and zero.median > 0.5):
            return []
        if np.median(spread) < 1e-3 or np.median(size) > 0.05:
            return []
        note = f"The mean |advantage| is {{value}} with a std of {number(float(np.median(spread)))} within groups; 0.6 and more is normal."
        return [run.fact(run["advantage/abs_mean"], float(np.median(size)), 0.05, note)]

    def lint(self, run: View) -> list[Evidence]:
        if run.number("objective.advantage_epsilon") >= 1e-2:
            note = "{option} is {value}, as large as a group's reward std."
            return [run.chosen("objective.advantage_epsilon", 1e-2, note, "strong")]
        return []
