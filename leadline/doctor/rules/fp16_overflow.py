import math

import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    is_half,
)
from leadline.doctor.signals import (
    GRAD,
)
from leadline.doctor.view import View


class Fp16Overflow(Rule):
    """float16 overflows: values above 65504 become infinite, and then NaN.

    ## Symptom
    The first step is normal; NaN, infinite gradients or a device assert follow within a few steps. The same run in bfloat16
    is fine. T4 and V100 have no bfloat16, so it is met there.

    ## Cause
    Activations (above all the MLP's of models trained in bfloat16) or an unscaled gradient leave the range of float16.

    ## Fix
    Train in bfloat16 or float32 (`model.dtype`); on hardware without bfloat16 use float32 for the layers that overflow and a
    loss scaler.

    ## References
    unslothai/unsloth-zoo pull 600. The setting alone is a possibility: with care fp16 lowers the mismatch (arXiv 2510.26788).
    """

    id = "LL411"
    name = "fp16-overflow"
    severity = "error"
    explains = ("nan-poisoned-weights", "updates-skipped", "group-size-too-small")
    sick = (
        RunLog.from_columns({"optimizer/grad_norm": [0.1, math.nan]}, {"model": {"dtype": "float16"}}),
        RunLog(
            [{"step": 1, "loss": 0.0, "optimizer/grad_norm": 0.11}, {"step": 2}],
            {"model": {"dtype": "float16"}, "run": {"steps": 8}},
        ),
    )
    healthy = (
        RunLog.from_columns({"optimizer/grad_norm": [0.1, math.nan]}, {"model": {"dtype": "bfloat16"}}),
        RunLog.from_columns({"optimizer/grad_norm": [0.1, 0.2, 0.1]}, {"model": {"dtype": "float32"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        if not is_half(run):
            return []
        found = run.events(
            run.first_of(*GRAD),
            lambda v: ~np.isfinite(v),
            math.inf,
            "The gradient norm was {value} {when}, in float16.",
        )[:3]
        wanted, rows = run.number("run.steps"), len(run["loss"])
        if wanted > run.last_step and 0 < rows < run.rows and rows <= 10:
            loss = run["loss"]
            note = (
                f"The last row with a loss is step {loss.step} of {number(wanted)}: a float16 run that stopped at once."
            )
            found.append(run.fact(loss, loss.last, wanted, note))
        return found

    def lint(self, run: View) -> list[Evidence]:
        if not is_half(run) or len(run.first_of(*GRAD).finite) >= TREND:
            return []
        return [Evidence("model.dtype", 0, 16.0, 0.0, "Training is in float16, whose largest number is 65504.", "weak")]

    def forbids(self, run: View) -> list[Evidence]:
        if run.setting("model.dtype") in ("bfloat16", "float32", "bf16", "fp32"):
            return [run.chosen("model.dtype", 0, "{option} is {value}.")]
        return []
