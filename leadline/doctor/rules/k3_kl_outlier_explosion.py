import math

import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    KL,
)
from leadline.doctor.view import View


class K3KlOutlierExplosion(Rule):
    """A few tokens make the exponential KL estimate astronomical.

    ## Symptom
    The mean KL is in the hundreds or more with a maximum orders above it, or a loss of infinity, while the policy loss is
    ordinary; a small beta hides it.

    ## Cause
    k3 = exp(x) - x - 1 with x = log pi_ref - log pi: a token that the reference likes and the policy (nearly) forbids counts
    exponentially. At x = 22 one token is worth 3.6e9.

    ## Fix
    Clamp the log ratio before the exponent (leadline does), or set `objective.kl_estimator` to k1 or k2. Look at the tokens:
    sampled by the engine, nearly impossible to one of the two models.

    ## References
    meta-pytorch/torchforge issue 664, huggingface/trl pull 6637. A mean above 100 nats, or a maximum 1000 times the mean: no real policy is so
    far away.
    """

    id = "LL412"
    name = "k3-kl-outlier-explosion"
    severity = "error"
    needs = ((*KL, "kl/max"),)
    explains = ("kl-drift-reward-collapse",)
    sick = (
        RunLog.from_columns({"kl/k3": [0.01, 0.02, 1.5e6]}),
        RunLog.from_columns({"kl/k3": [1.2], "kl/max": [6.8e9]}),
        RunLog.from_columns({"kl/k3": [0.01, math.inf], "loss": [0.0, math.inf]}),
    )
    healthy = (RunLog.from_columns({"kl/k3": [0.01, 0.02, 0.4], "kl/max": [1.0, 2.0, 9.0]}),)

    def examine(self, run: View) -> list[Evidence]:
        found = []
        for name in ("kl/k3", "kl/reference"):
            note = f"{name} was {{value}} {{when}}: a few tokens dominate the mean."
            found += run.events(name, lambda v: (v > 100) | np.isposinf(v), 100.0, note, "strong")
        steps, mean, largest = paired(run.first_of(*KL), run["kl/max"])
        wild = (largest > 1000 * np.maximum(np.abs(mean), 1e-3)) & (largest > 1000)
        if wild.any():
            at = int(np.flatnonzero(wild)[-1])
            note = f"The largest KL is {number(float(largest[at]))} with a mean of {number(float(mean[at]))} at step {int(steps[at])}."
            found.append(Evidence("kl/max", int(steps[at]), float(largest[at]), 1000.0, note))
        return sorted(found, key=lambda item: item.step)

    def measure(self, run: View) -> list[Evidence]:
        return probe.above(run, r"\bkl\b(?!.*(factor|growth|coef))", 100, "{name} is {value}.")

    def forbids(self, run: View) -> list[Evidence]:
        kl, largest = run.first_of("kl/k3", "kl/reference", "kl/k2").known, run["kl/max"].finite
        if len(kl) and kl.values.max() < 10 and not largest.high > 1000:
            return [run.fact(kl, float(kl.values.max()), 100.0, "The KL never exceeds {value}.")]
        return []
