from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class AbsoluteDifferenceIsNegative(Rule):
    """A metric that cannot be negative is negative: it is not what its name says.

    ## Symptom
    A mean absolute difference, a k3 KL or an effective sample size is below 0.

    ## Cause
    The absolute value or the exponent is missing in the metric, so differences of both signs cancel and the mismatch looks
    small.

    ## Fix
    Do not judge the mismatch by this metric; take the absolute value per token before averaging.

    ## References
    THUDM/slime issue 596. The bound 0 is exact, up to -1e-6 for rounding.
    """

    id = "LL323"
    name = "absolute-difference-is-negative"
    severity = "warning"
    needs = ((*GAP, "importance/kl_k3", "importance/ess", "kl/k3"),)
    sick = (RunLog.from_columns({"importance/log_ratio_abs_mean": [-0.003, 0.002, -0.004]}),)
    healthy = (RunLog.from_columns({"importance/log_ratio_abs_mean": [0.003, 0.002, 0.004]}),)

    def examine(self, run: View) -> list[Evidence]:
        note = "{value} {when}: such a quantity cannot be below 0."
        names = (*GAP, "importance/log_ratio_abs_max", "importance/kl_k3", "importance/ess", "policy/entropy", "kl/k3")
        found = [item for name in names for item in run.events(name, lambda v: v < -1e-6, 0.0, f"{name} was {note}")]
        return sorted(found, key=lambda item: item.step)
