import math

import numpy as np

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
    KL,
)
from leadline.doctor.view import View


class NanMetricAggregation(Rule):
    """A metric is NaN because one missing value hides all others; the training itself is fine.

    ## Symptom
    Only the means of reward components (or a KL) are NaN; loss and gradient norm are finite throughout.

    ## Cause
    A component that does not apply to every prompt returns None, which becomes NaN, and a plain mean over the logging
    window takes it in.

    ## Fix
    Average without the missing values (nanmean) and log how many there were. Nothing is wrong with the update.

    ## References
    huggingface/trl issue 4501, NovaSky-AI/SkyRL issue 1633 (policy_kl NaN with fine gradients). Not a threshold.
    """

    id = "LL114"
    name = "nan-metric-aggregation"
    severity = "warning"
    needs = (GRAD,)
    sick = (
        RunLog.from_columns({"reward/math/mean": [0.4, math.nan, 0.5], "optimizer/grad_norm": [0.3, 0.2, 0.4]}),
        RunLog.from_columns(
            {"reward/math/mean": [math.nan] * 2, "optimizer/grad_norm": [0.3, 0.2], "loss": [0.0, 0.1]}
        ),
    )
    healthy = (
        RunLog.from_columns({"reward/math/mean": [0.4, math.nan], "optimizer/grad_norm": [0.3, math.nan]}),
        RunLog.from_columns({"kl/k3": [math.nan] * 2, "optimizer/grad_norm": [0.3, 0.2]}, {"objective": {"beta": 0.0}}),
        RunLog.from_columns({"reward/math/mean": [0.4, 0.4], "optimizer/grad_norm": [0.3, 0.2]}),
    )

    def examine(self, run: View) -> list[Evidence]:
        grad, loss = run.first_of(*GRAD), run["loss"]
        if not np.isfinite(grad.values).all() or not np.isfinite(loss.values).all():
            return []
        watched = {**run.family(r"reward/[^/]+/mean"), "reward/mean": run["reward/mean"]}
        if run.number("objective.beta") > 0:
            watched |= {name: run[name] for name in KL}
        return [
            Evidence(
                name,
                int(bad.steps[-1]),
                math.nan,
                0.0,
                f"{name} was NaN in {len(bad)} of {len(part)} rows, last at step {bad.steps[-1]}; the gradient norm was finite.",
            )
            for name, part in watched.items()
            if len(bad := part.where(np.isnan(part.values)))
        ]

    def forbids(self, run: View) -> list[Evidence]:
        grad = run.first_of(*GRAD)
        bad = grad.where(~np.isfinite(grad.values))
        return [run.fact(bad, math.nan, 0.0, "The gradient norm itself is not finite.")] if len(bad) else []
