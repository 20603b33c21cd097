import numpy as np

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    KL,
)
from leadline.doctor.view import View


class KlMetricUsesOtherEstimator(Rule):
    """The logged KL is another estimator than the one in the loss.

    ## Symptom
    A negative KL is logged although the configured penalty (abs, square, full, k2, k3) cannot be negative.

    ## Cause
    The metric always reports the plain difference of logprobs, whatever the loss uses.

    ## Fix
    Nothing is wrong with the update. Log the estimator that the loss uses, and judge drift by that.

    ## References
    huggingface/trl issue 1161 and pull 1180. A sign that the estimator cannot have.
    """

    id = "LL415"
    name = "kl-metric-uses-other-estimator"
    severity = "warning"
    explains = ("negative-kl-sampling-mismatch",)
    sick = (
        RunLog.from_columns({"kl/reference": [-0.3, -0.5, -0.8]}, {"objective": {"kl_estimator": "k3"}}),
        RunLog([{"step": 1}], {"raw": {"kl_penalty": "full", "note": "negative KL warning"}}),
    )
    healthy = (
        RunLog.from_columns({"kl/reference": [-0.3, -0.5, -0.8]}, {"objective": {"kl_estimator": "k1"}}),
        RunLog.from_columns({"kl/reference": [0.3, 0.5]}, {"objective": {"kl_estimator": "k3"}}),
    )

    def _positive(self, run: View) -> str | None:
        if run.setting("objective.kl_estimator") in ("k2", "k3", "abs", "full", "mse", "low_var_kl", "square"):
            return f"{run.option('objective.kl_estimator')} = {run.setting('objective.kl_estimator')}"
        return run.says(r"kl_(penalty|type|loss_type|estimator)\W*= (abs|full|mse|low_var_kl|k2|k3|square)")

    def examine(self, run: View) -> list[Evidence]:
        kl, said = run.first_of("kl/reference", "kl/k1").finite, self._positive(run)
        if not said or not len(kl) or np.mean(kl.values < -1e-3) < 0.5:
            return []
        return [run.fact(kl, kl.median, 0.0, f"The logged KL is {{value}}, which the penalty ({said}) cannot be.")]

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"kl_penalty\W*= .*(abs|full)")
        if said and not run.has(*KL):
            return [
                Evidence(
                    "kl_penalty",
                    0,
                    1.0,
                    0.0,
                    f"The logged KL may be the plain difference, not the penalty ({said}).",
                    "weak",
                )
            ]
        return []
