import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, Strength
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    GRAD,
    KL,
)
from leadline.doctor.view import View


class GradClipSwallowsUpdate(Rule):
    """The bound of gradient clipping is 0, negative or next to nothing: updates are erased or reversed.

    ## Symptom
    The gradient norm before clipping is normal, and no weight moves, or all move the wrong way.

    ## Cause
    Clipping multiplies by bound / norm without checking the bound: 0 erases every gradient, a negative value reverses it. AdamW undoes the scale of a gradient only while it is above its eps of 1e-8
    per weight: a bound of 1e-5 and less pushes it below.

    ## Fix
    Set `optimizer.max_grad_norm` to 1.0. To switch clipping off, use a large bound or the framework's own switch, not 0.

    ## References
    strands-labs/robots pull 2028 (0 moved nothing, -1 flipped 96.5 % of the signs). The rule of the multiplication is exact; some trainers
    read 0 as off, and then it is harmless.
    """

    id = "LL426"
    name = "grad-clip-swallows-update"
    severity = "error"
    explains = ("optimizer-empty-frozen-adapter", "reference-not-frozen")
    sick = (
        RunLog([], {"optimizer": {"max_grad_norm": -1.0}}),
        RunLog([], {"optimizer": {"max_grad_norm": 1e-9}}),
        RunLog([{"step": 1, "max_grad_norm": 0, "params_moved": 0}]),
        RunLog.from_columns({"optimizer/grad_norm": [0.4] * 3, "optimizer/grad_norm_clipped": [0.0] * 3}),
    )
    healthy = (
        RunLog([], {"optimizer": {"max_grad_norm": 0.001}}),
        RunLog.from_columns({"optimizer/grad_norm": [4.0] * 3, "optimizer/grad_norm_clipped": [1.0] * 3}),
    )

    least = 1e-5

    def examine(self, run: View) -> list[Evidence]:
        found = []
        for name, bound in run.measured(r"max grad norm|grad clip|clip grad"):
            wrong = bound.finite.where(bound.finite.values <= 0)
            if len(wrong):
                found.append(run.fact(wrong, wrong.low, 0.0, f"{name} is {{value}}: clipping multiplies by it."))
        if found:
            found += probe.zero(
                run, r"param.*(moved|chang)|weights?.*(moved|chang)", "{name} is 0: nothing moved.", "proof"
            )
        steps, before, after = paired(run.first_of(*GRAD), run["optimizer/grad_norm_clipped"])
        if len(steps) and np.median(before) > 1e-6 and after.max() == 0:
            found.append(
                run.fact(
                    run["optimizer/grad_norm_clipped"],
                    0.0,
                    float(np.median(before)),
                    "The gradient norm is {value} after clipping and {limit} before.",
                    "proof",
                )
            )
        return found

    def lint(self, run: View) -> list[Evidence]:
        bound, moving = run.number("optimizer.max_grad_norm"), run.first_of(*KL).finite
        if 0 < bound <= self.least:
            note = "{option} is {value}: AdamW divides by the root of the second moment plus 1e-8, and 1e-8 is then the larger."
            return [run.chosen("optimizer.max_grad_norm", self.least, note, "strong")]
        if not bound <= 0 or (len(moving) > 3 and moving.late > 3 * max(moving.early, 1e-7)):
            return []
        kind: Strength = "strong" if bound < 0 else "weak"
        return [
            run.chosen(
                "optimizer.max_grad_norm",
                0.0,
                "{option} is {value}: clipping to it erases or reverses the update.",
                kind,
            )
        ]

    def forbids(self, run: View) -> list[Evidence]:
        if run.number("optimizer.max_grad_norm") > self.least:
            return [run.chosen("optimizer.max_grad_norm", 0.0, "{option} is {value}, above 0.")]
        return []
