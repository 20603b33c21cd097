import math

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
)
from leadline.doctor.view import View


class RewardsAllMissing(Rule):
    """No completion has a reward.

    ## Symptom
    Loss and gradient are 0, the reward is NaN or absent, and the zero-spread fraction may even read 0.

    ## Cause
    Every reward function returned None for every completion: a column name that does not match the data, a task that no
    function feels responsible for, or a service that is down.

    ## Fix
    Print what the reward functions receive for one row. At least one must return a number for each completion.

    ## References
    Measured on TRL 1.16: with all rewards None the loss and the gradient norm are 0 and frac_reward_zero_std is 0.0. Not a
    threshold.
    """

    id = "LL117"
    name = "rewards-all-missing"
    severity = "error"
    needs = (("reward/mean", "rollout/unrewarded_fraction"),)
    explains = ("no-update-grad-and-kl-exactly-zero", "zero-reward-variance-within-group", "nan-metric-aggregation")
    sick = (
        RunLog.from_columns({"reward/mean": [math.nan] * 3, "optimizer/grad_norm": [0.0] * 3}),
        RunLog.from_columns({"rollout/unrewarded_fraction": [1.0, 1.0, 1.0]}),
    )
    healthy = (
        RunLog.from_columns({"reward/mean": [0.1, math.nan], "optimizer/grad_norm": [0.1, 0.0]}),
        RunLog.from_columns({"reward/mean": [math.nan] * 3, "optimizer/grad_norm": [math.nan] * 3}),
    )

    def examine(self, run: View) -> list[Evidence]:
        note = "{percent} of the rollouts had no reward {when}."
        found = run.lasting("rollout/unrewarded_fraction", lambda v: v >= 0.999, 1.0, note)
        reward, grad = run["reward/mean"], run.first_of(*GRAD)
        if len(reward) and not len(reward.finite) and len(grad.finite) and grad.high < 1e-9:
            note = f"The mean reward was NaN in all {len(reward)} rows, and the gradient norm 0."
            found.append(Evidence("reward/mean", reward.step, math.nan, 0.0, note))
        return found
