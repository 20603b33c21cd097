import math

import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
)
from leadline.doctor.view import View


class NanRewardPoisonsAdvantage(Rule):
    """A NaN or infinite reward makes the advantages of its group NaN.

    ## Symptom
    A reward component is NaN, and from that step the gradient norm is NaN while texts are still fine. The logged loss may
    read 0.0: some trainers replace a NaN loss before they log it.

    ## Cause
    A reward returned NaN or infinity (a division, an empty answer, a failed service), and mean and std of the group took
    it in. Every completion of the group, then every weight, becomes NaN.

    ## Fix
    Return a finite number or "no reward" (None), never NaN; check for it in the reward. Go back to the last checkpoint
    before the first NaN: the weights after it are lost.

    ## References
    huggingface/trl: advantages pass through nan_to_num, which turns minus infinity into -3.4e38. Not a threshold: a number is
    finite or not.
    """

    id = "LL113"
    name = "nan-reward-poisons-advantage"
    severity = "error"
    needs = (GRAD,)
    explains = ("nan-poisoned-weights", "zero-reward-variance-within-group", "advantage-blowup-tiny-std")
    sick = (
        RunLog.from_columns(
            {"advantage/abs_mean": [0.7, math.nan, math.nan], "optimizer/grad_norm": [0.3, math.nan, math.nan]}
        ),
        RunLog.from_columns(
            {"reward/math/mean": [0.4, math.nan, math.nan], "optimizer/grad_norm": [0.3, math.nan, math.nan]}
        ),
        RunLog.from_columns({"reward/mean": [0.4, math.inf], "optimizer/grad_norm": [0.3, math.nan]}),
    )
    healthy = (
        RunLog.from_columns({"reward/math/mean": [0.4, math.nan, 0.5], "optimizer/grad_norm": [0.3, 0.2, 0.4]}),
        RunLog.from_columns({"reward/mean": [0.4, 0.5], "optimizer/grad_norm": [0.3, math.nan]}),
    )

    def examine(self, run: View) -> list[Evidence]:
        grad = run.first_of(*GRAD)
        bad = set(grad.steps[~np.isfinite(grad.values)].tolist())
        found = []
        for name, series in run.family(r"(reward/(?!.*none_fraction)|advantage/).*").items():
            for step, value in zip(series.steps, series.values, strict=True):
                if not np.isfinite(value) and int(step) in bad:
                    note = f"{name} was {value} at step {step}, where the gradient norm is not finite."
                    found.append(Evidence(name, int(step), float(value), 0.0, note))
                    break
        for item in self._infinite(run):
            if item.step not in bad:
                found.append(item)
        return sorted(found, key=lambda item: item.step)

    @staticmethod
    def _infinite(run: View) -> list[Evidence]:
        """An infinite reward with a finite gradient: the trainer set the advantages of its group to 0."""
        note = "{name} was {value} {when}: no completion of that group has an advantage."
        return [
            item
            for name in ("reward/max", "reward/min", "reward/mean")
            for item in run.events(name, np.isinf, math.inf, note.replace("{name}", name))
        ]

    def measure(self, run: View) -> list[Evidence]:
        note = "{name} is {value}: a reward was not finite."
        return probe.above(
            run, r"(nan|inf|non ?finite).*(reward|score)|(reward|score).*(nan|non ?finite)", 0, note, "strong"
        )

    def forbids(self, run: View) -> list[Evidence]:
        grad = run.first_of(*GRAD)
        if len(grad) and np.isfinite(grad.values).all() and not self._infinite(run):
            return [run.fact(grad, grad.last, math.inf, "Every gradient norm is finite (last {value}).")]
        return []
