import numpy as np

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.view import View


class CorrectionUsesCurrentPolicy(Rule):
    """The correction takes the current policy in its numerator instead of the old one.

    ## Symptom
    The correction weight and the policy ratio are the same number in every row.

    ## Cause
    The weight should be pi_old / mu. With the current logprobs it is pi_theta / mu and counts the policy's own move twice.

    ## Fix
    Compute the weight from the logprobs before the update, once per batch.

    ## References
    THUDM/slime issue 179. Identical numbers that are not 1 are no chance.
    """

    id = "LL322"
    name = "correction-uses-current-policy"
    severity = "error"
    needs = ("importance/weight_mean", "policy/ratio_mean")
    sick = (
        RunLog.from_columns({"importance/weight_mean": [1.01, 0.98, 1.03], "policy/ratio_mean": [1.01, 0.98, 1.03]}),
    )
    healthy = (
        RunLog.from_columns({"importance/weight_mean": [1.0, 1.0, 1.0], "policy/ratio_mean": [1.0, 1.0, 1.0]}),
        RunLog.from_columns({"importance/weight_mean": [1.0001, 1.0002, 1.0], "policy/ratio_mean": [1.0, 1.01, 1.02]}),
    )

    def examine(self, run: View) -> list[Evidence]:
        steps, weight, ratio = paired(run["importance/weight_mean"], run["policy/ratio_mean"])
        moved = np.abs(ratio - 1) > 1e-4
        if moved.sum() < 3 or not np.array_equal(weight[moved], ratio[moved]):
            return []
        note = f"Weight and policy ratio are the same number in {int(moved.sum())} rows, last {{value}}."
        return [run.fact(run["importance/weight_mean"], float(weight[-1]), 1.0, note, "proof", int(steps[0]))]
