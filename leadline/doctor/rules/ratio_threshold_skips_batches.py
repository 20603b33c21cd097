import numpy as np

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.view import View


class RatioThresholdSkipsBatches(Rule):
    """Batches are skipped because their mean ratio exceeds a threshold.

    ## Symptom
    Warnings that the average ratio is above a threshold; updates are dropped and the effective batch shrinks.

    ## Cause
    The policy moves too far inside one batch (learning rate, inner epochs), or, if it happens at the first step, old and new
    logprobs do not match.

    ## Fix
    Lower `optimizer.learning_rate` or `optimizer.epochs_per_batch`. Raising the threshold only hides it.

    ## References
    huggingface/trl issue 1857 (12.26 above 10). A mean policy ratio above 2 is leadline's limit: a clip at 0.2 keeps it near 1.
    """

    id = "LL416"
    name = "ratio-threshold-skips-batches"
    severity = "error"
    explains = ("negative-kl-sampling-mismatch",)
    sick = (
        RunLog.from_columns({"policy/ratio_mean": [1.1, 5.0, 12.0]}),
        RunLog([{"step": 1, "ratio_mean": 12.26, "ratio_threshold": 10.0}]),
    )
    healthy = (
        RunLog.from_columns({"policy/ratio_mean": [1.0, 1.05, 1.1]}),
        RunLog([{"step": 1, "ratio_mean": 1.02, "ratio_threshold": 10.0}]),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = run.events("policy/ratio_mean", lambda v: v > 2, 2.0, "The mean policy ratio was {value} {when}.")
        for _, limit in run.measured(r"ratio.*threshold|threshold.*ratio"):
            names = [s for n, s in run.measured(r"ratio") if "thresh" not in n] + [
                run["policy/ratio_mean"],
                run["importance/ratio_mean"],
            ]
            for ratio in names:
                steps, value, bound = paired(ratio, limit)
                if len(steps) and np.any(value > bound):
                    found.append(
                        run.fact(
                            ratio,
                            float(value.max()),
                            float(bound[0]),
                            "The mean ratio {value} is above the threshold {limit}: the batch is skipped.",
                        )
                    )
        return found
