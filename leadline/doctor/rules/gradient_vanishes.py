import numpy as np

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
    KL,
    SPREAD,
    ZERO_SIGNAL,
    has_signal,
    reward_rises,
    share_with,
)
from leadline.doctor.view import View


class GradientVanishes(Rule):
    """The gradient is tiny although rewards vary: most of the signal is lost on the way.

    ## Symptom
    The gradient norm stays below 0.01 in nearly every row, rewards vary within groups, KL does not grow and the reward is
    flat.

    ## Cause
    One factor of the update is close to 0: importance weights, a clip range, a mask, a wrong denominator. The signal budget
    shows which factors are known and which are not.

    ## Fix
    Look at the budget. Where a factor is not logged, log it: importance ratios, clip fraction, truncated share. Compare the
    gradient norm (not the loss) of one batch with the correction, then the mask, switched off.

    ## References
    The public zero-loss run (Madison): rewards healthy, gradient norm 0.005, found only when the importance ratio was read. 0.01 with a flat reward over ten rows:
    leadline's choice, and only a possibility, for norms depend on the model.
    """

    id = "LL433"
    name = "gradient-vanishes"
    severity = "warning"
    needs = (GRAD, (*ZERO_SIGNAL, *SPREAD, "advantage/abs_mean"))
    sick = (
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.0053] * 12, "reward/std": [0.5] * 12, "reward/mean": [0.8] * 12}
        ),
    )
    healthy = (
        RunLog.from_columns({"optimizer/grad_norm": [0.3] * 12, "reward/std": [0.5] * 12}),
        RunLog.from_columns(
            {
                "optimizer/grad_norm": [0.005] * 12,
                "reward/std": [0.5] * 12,
                "reward/mean": [0.3 + 0.02 * i for i in range(12)],
            }
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        grad, kl = run.first_of(*GRAD).finite, run.first_of(*KL).finite
        alive = share_with(has_signal(run), grad) > 0.8
        if len(grad) < 6 or not alive or grad.median > 0.01 or grad.median < 1e-9 or np.mean(grad.values < 0.02) < 0.8:
            return []
        moving = reward_rises(run) or (len(kl) > 5 and kl.late > 3 * max(kl.early, 1e-7))
        if moving:
            return []
        note = "The gradient norm is typically {value} though rewards vary, and neither reward nor KL moves."
        return [run.fact(grad, grad.median, 0.01, note, "weak", int(grad.steps[0]))]
