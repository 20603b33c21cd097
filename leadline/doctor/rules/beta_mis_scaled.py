import math
from collections.abc import Sequence

import numpy as np

from leadline.doctor.rule import PERSISTENT, TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Floats, paired
from leadline.doctor.signals import (
    reward_rises,
)
from leadline.doctor.view import View


class BetaMisScaled(Rule):
    """The KL term outweighs the policy term, so the policy is held at the reference.

    ## Symptom
    The loss is beta x KL to within a few per cent and far above the policy term; the KL is pinned and the reward flat. The
    coefficient is 0.2 or more, or was taken over from another objective.

    ## Cause
    A coefficient fits one objective and one estimator. Too large, the optimizer minimises the loss by not moving; too small,
    the policy drifts.

    ## Fix
    Lower `objective.beta`: to 0.001 to 0.04, or by the factor that brings beta x KL below a tenth of |advantage|.

    ## References
    Common Pitfalls in RL Post-Training: a KL term of ten times the policy term is too large. mlvlab/DeepVideoR1 issue 2. beta x KL above 0.1 with a flat reward
    over 20 rows; 0.2 and more as a setting: leadline's choice.
    """

    id = "LL419"
    name = "beta-mis-scaled"
    severity = "error"
    explains = ("reference-not-frozen",)
    confirm = "Log policy term and KL term of the loss apart."
    sick = (
        RunLog.from_columns(
            {"loss": [0.3] * 30, "kl/k3": [0.6] * 30, "reward/mean": [0.3] * 30}, {"objective": {"beta": 0.5}}
        ),
        RunLog.from_columns({"loss/kl": [0.5] * 6, "loss/policy": [0.01] * 6, "reward/mean": [0.3] * 6}),
        RunLog([{"step": 1, "beta": 0.002}, {"step": 2, "beta": 0.1}, {"step": 3, "beta": 1.0}]),
    )
    healthy = (
        RunLog.from_columns(
            {"loss": [0.0019] * 30, "kl/k3": [0.0485] * 30, "reward/mean": [0.3] * 30}, {"objective": {"beta": 0.04}}
        ),
        RunLog.from_columns({"loss/kl": [0.001] * 6, "loss/policy": [1e-9] * 6}),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        steps, term, policy = paired(run["loss/kl"], run["loss/policy"])
        if (
            len(steps) >= PERSISTENT
            and np.median(term) > 0.1
            and np.median(np.abs(term)) > 10 * np.median(np.abs(policy))
        ):
            note = f"The KL term of the loss is {{value}}, the policy term {number(float(np.median(np.abs(policy))))}."
            found.append(run.fact(run["loss/kl"], float(np.median(term)), 0.1, note, since=int(steps[0])))
        steps, loss, kl = paired(run["loss"], run.first_of("kl/k3", "kl/reference"))
        beta = run.number("objective.beta")
        if np.isnan(beta):
            beta = _slope(loss, kl)
        flat = not reward_rises(run)
        heavy = beta > 0 and len(steps) >= TREND and np.median(beta * kl) > 0.1
        if not found and heavy and flat and np.median(np.abs(loss - beta * kl)) < 0.1 * np.median(beta * kl):
            note = f"The loss is beta x KL ({{value}} = {beta:g} x {number(float(np.median(kl)))}): the policy term is lost beside it."
            found.append(run.fact(run["loss"], float(np.median(loss)), 0.1, note, since=int(steps[0])))
        swept = [
            s for n, s in run.measured(r"\b(beta|kl coef\w*|kl loss coef)\b") if len(np.unique(s.finite.values)) > 1
        ]
        for series in swept:
            note = f"{series.name} was varied from {number(series.low)} to {{value}}: outcomes depend on its scale."
            found.append(run.fact(series, series.high, series.low, note))
        return found

    def lint(self, run: View) -> list[Evidence]:
        if not run.number("objective.beta") >= 0.2 or (run.rows >= TREND and reward_rises(run)):
            return []
        return [run.chosen("objective.beta", 0.2, "{option} is {value}; GRPO usually wants 0 to 0.04.")]

    def forbids(self, run: View) -> list[Evidence]:
        if run.number("objective.beta") == 0:
            return [run.chosen("objective.beta", 0, "{option} is {value}: there is no KL term.")]
        return []

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        return "Do not raise the coefficient because the KL looks large: the KL term is what the loss consists of."


def _slope(loss: Floats, kl: Floats) -> float:
    """The coefficient that the log itself shows: the loss is a fixed multiple of a KL that varies; else NaN."""
    if len(kl) < TREND or not np.std(kl) > 0.01 * np.mean(np.abs(kl)) or not np.corrcoef(loss, kl)[0, 1] > 0.99:
        return math.nan
    return float(loss @ kl / (kl @ kl))
