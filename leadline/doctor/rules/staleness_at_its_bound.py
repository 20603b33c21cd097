import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class StalenessAtItsBound(Rule):
    """Rollouts are always as old as they may be.

    ## Symptom
    The staleness sits at its bound in nine of ten steps.

    ## Cause
    Generation is faster than training, so every slot is always held: the bound, meant as a safety, has become the operating
    point.

    ## Fix
    Lower `rollout.max_staleness` to what the hardware needs (1 or 2), or keep fewer rollouts in flight.

    ## References
    thinking-machines-lab/tinker-cookbook pull 822 (always at K, entropy collapse). The share of 0.9 is leadline's choice.
    """

    id = "LL319"
    name = "staleness-at-its-bound"
    severity = "warning"
    needs = (("staleness/mean", "staleness/min"),)
    sick = (RunLog.from_columns({"staleness/mean": [3.9] * 20}, {"rollout": {"max_staleness": 4}}),)
    healthy = (
        RunLog.from_columns({"staleness/mean": [1.2] * 20}, {"rollout": {"max_staleness": 4}}),
        RunLog.from_columns({"staleness/mean": [1.0] * 20}, {"rollout": {"max_staleness": 1}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        bound, stale = run.number("rollout.max_staleness"), run.first_of("staleness/mean", "staleness/min").finite
        if not bound >= 2 or len(stale) < TREND or np.mean(stale.values >= 0.95 * bound) < 0.9:
            return []
        return [run.fact(stale, stale.median, bound, "Rollouts are {value} steps old; the bound is {limit}.")]
