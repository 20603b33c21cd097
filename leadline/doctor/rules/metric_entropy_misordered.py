from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class MetricEntropyMisordered(Rule):
    """The logged entropy mixes up the order of the samples: the metric is wrong, the update is not.

    ## Symptom
    The entropy at the first step differs between versions of the code, or between dynamic and fixed batches, on the same
    model.

    ## Cause
    Under dynamic batching the entropies are not put back into the original order while the mask is.

    ## Fix
    Update the framework, or switch dynamic batching off to compare; judge entropy within one version only.

    ## References
    thunlp/JustRL issue 5 (0.6 against 1.0 nats on the same model). Two starts that differ by a quarter.
    """

    id = "LL424"
    name = "metric-entropy-misordered"
    severity = "warning"
    confirm = "Log the entropy of one batch with fixed and with dynamic batching."
    sick = (
        RunLog(
            [{"step": 1, "entropy_start": 1.0}, {"step": 2, "entropy_start": 0.6}], {"raw": {"use_dynamic_bsz": True}}
        ),
    )
    healthy = (
        RunLog(
            [{"step": 1, "entropy_start": 1.0}, {"step": 2, "entropy_start": 0.98}], {"raw": {"use_dynamic_bsz": True}}
        ),
        RunLog(
            [{"step": 1, "entropy_start": 1.0}, {"step": 2, "entropy_start": 0.6}], {"raw": {"use_dynamic_bsz": False}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        if not run.says(r"dynamic_(bsz|batch\w*)\W*= (true|1)"):
            return []
        return [
            run.fact(
                series,
                series.low,
                series.high,
                f"{name} is {{value}} in one run and {{limit}} in another, with dynamic batches.",
            )
            for name, series in run.measured(r"entropy")
            if len(series.finite) > 1 and series.low < 0.75 * series.high
        ]
