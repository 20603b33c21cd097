import numpy as np

from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
    KL,
)
from leadline.doctor.view import View


class MetricVanished(Rule):
    """A metric that was logged stops being logged: it may have become NaN.

    ## Symptom
    A key is in every row up to some step and in none afterwards.

    ## Cause
    Some trainers drop a metric that is NaN or infinite from the row (prime-rl drops the key, TRL logs null). Absence is then the
    only trace of the fault.

    ## Fix
    Look at the step at which it vanished, in the console output, and log non-finite values as such. Check the weights for NaN.

    ## References
    PrimeIntellect-ai/prime-rl's file monitor; huggingface/trl's log drops NaN entries. Present in 90 % of the rows before and in none of at least five
    after: leadline's choice.
    """

    id = "LL604"
    name = "metric-vanished"
    severity = "warning"
    needs = (("loss", *GRAD, *KL, "reward/mean"),)
    sick = (
        RunLog([{"step": s, "loss": 0.0} | ({"optimizer/grad_norm": 0.3} if s < 12 else {}) for s in range(1, 21)]),
    )
    healthy = (
        RunLog([{"step": s, "loss": 0.0, "optimizer/grad_norm": 0.3} for s in range(1, 21)]),
        RunLog([{"step": s, "loss": 0.0} | ({"reward/mean": 0.3} if s % 4 == 0 else {}) for s in range(1, 21)]),
    )
    watched = (
        "loss",
        "optimizer/grad_norm",
        "reward/mean",
        "policy/entropy",
        "kl/k3",
        "kl/reference",
        "importance/ratio_mean",
        "importance/weight_mean",
        "importance/kl_k3",
        "importance/kl_k1",
        "importance/log_ratio_abs_mean",
    )

    def examine(self, run: View) -> list[Evidence]:
        longest = max((run[name] for name in self.watched), key=lambda series: series.step)
        found = []
        for name in self.watched:
            series = run[name]
            if len(series) < 10 or series.step == longest.step:
                continue
            before = longest.where(longest.steps <= series.step)
            after = longest.where(longest.steps > series.step)
            steady = len(np.intersect1d(series.steps, before.steps)) >= 0.9 * len(before)
            if steady and len(after) >= 5:
                note = f"{name} was logged up to step {series.step} (last {number(series.last)}) and in none of the {len(after)} rows after."
                found.append(Evidence(name, series.step, float(series.values[-1]), 0.0, note))
        return sorted(found, key=lambda item: item.step)
