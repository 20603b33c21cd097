import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    GRAD,
)
from leadline.doctor.view import View


class MaskDenominatorMismatch(Rule):
    """Masked tokens leave the numerator of the loss and stay in its denominator.

    ## Symptom
    The gradient norm shrinks in proportion to the share of truncated (masked) completions; all else is normal.

    ## Cause
    The loss sums over unmasked tokens and divides by a count that includes masked ones.

    ## Fix
    Count the tokens after masking. Until then switch the masking off (`objective.mask_truncated`).

    ## References
    huggingface/trl issue 6369 and pull 6439 (dapo, cispo, vespo). A correlation of the gradient norm with the kept share above 0.8: leadline's
    choice; the settings alone are a possibility.
    """

    id = "LL427"
    name = "mask-denominator-mismatch"
    severity = "warning"
    sick = (
        RunLog.from_columns(
            {
                "rollout/truncated_fraction": [0.1 + 0.02 * i for i in range(40)],
                "optimizer/grad_norm": [0.5 * (0.9 - 0.02 * i) for i in range(40)],
            },
            {"objective": {"mask_truncated": True}},
        ),
        RunLog(
            [],
            {
                "objective": {"mask_truncated": True, "loss": "dapo"},
                "raw": {"loss_type": "dapo", "mask_truncated_completions": True},
            },
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.1 + 0.02 * i for i in range(40)], "optimizer/grad_norm": [0.5] * 40},
            {"objective": {"mask_truncated": True}},
        ),
        RunLog([], {"objective": {"mask_truncated": False, "loss": "dapo"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        steps, cut, grad = paired(run["rollout/truncated_fraction"], run.first_of(*GRAD))
        if (
            run.setting("objective.mask_truncated") is not True
            or len(steps) < TREND
            or np.ptp(cut) < 0.2
            or np.ptp(grad) == 0
        ):
            return []
        match = float(np.corrcoef(grad, 1 - cut)[0, 1])
        scaled = grad / np.maximum(1 - cut, 1e-3)
        if match < 0.8 or np.std(scaled) / np.mean(scaled) > 0.3 or cut.max() > 0.98:
            return []
        note = "The gradient norm follows the kept share of completions (correlation {value})."
        return [run.fact(run.first_of(*GRAD), match, 0.8, note, since=int(steps[0]))]

    def lint(self, run: View) -> list[Evidence]:
        on = run.setting("objective.mask_truncated") is True or run.says(r"mask_truncated\w*\W*= (true|1)")
        loss = run.says(r"loss_type\W*= .*(dapo|cispo|vespo)")
        if not on or not loss or (run.framework == "leadline" and not loss) or len(run.first_of(*GRAD).finite):
            return []
        return [
            Evidence(
                "mask_truncated",
                0,
                1.0,
                0.0,
                f"Truncated completions are masked with {loss}: some versions count them all the same.",
                "weak",
            )
        ]
