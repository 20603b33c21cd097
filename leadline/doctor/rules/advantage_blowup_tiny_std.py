import math

import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
)
from leadline.doctor.view import View


class AdvantageBlowupTinyStd(Rule):
    """Rewards that are almost equal are divided by their tiny std.

    ## Symptom
    Loss or gradient norm spikes to giant or NaN values after hundreds of quiet steps; advantages exceed
    (G - 1) / sqrt(G); often with groups of two.

    ## Cause
    The std of nearly equal rewards is rounding noise (1e-6), not exactly 0, and the advantage divides by it. A
    leave-one-out baseline with normalisation, or a variance computed as E[x^2] - E[x]^2, makes it worse.

    ## Fix
    Treat groups whose rewards are equal up to rounding as having no signal, compare rewards exactly, or add a floor of
    1e-4 to the std (`objective.advantage_epsilon`). Use groups of 8 (`rollout.group_size`) and clip the gradient.

    ## References
    Goekdeniz-Guelmez/mlx-lm-lora issue 50; NVIDIA-NeMo/RL issues 1518, 4158 and 4161 (advantages of 7428). The bound of an advantage
    normalised within a group of G is (G - 1) / sqrt(G).
    """

    id = "LL115"
    name = "advantage-blowup-tiny-std"
    severity = "error"
    explains = ("nan-poisoned-weights", "group-size-too-small")
    confirm = "Log the smallest nonzero std of a group beside the largest advantage."
    sick = (
        RunLog.from_columns({"advantage/max": [1.5, 1.7, 7428.0], "optimizer/grad_norm": [0.3, 0.3, 35.0]}),
        RunLog.from_columns({"optimizer/grad_norm": [0.2] * 30 + [math.nan]}, {"rollout": {"group_size": 2}}),
    )
    healthy = (
        RunLog.from_columns({"advantage/max": [1.5, 1.7, 2.4], "optimizer/grad_norm": [0.3, 0.3, 0.4]}),
        RunLog.from_columns({"optimizer/grad_norm": [0.2] * 30}, {"rollout": {"group_size": 2}}),
        RunLog([], {"rollout": {"group_size": 8}}),
    )
    limit = 20.0

    def examine(self, run: View) -> list[Evidence]:
        note = "An advantage of {value} {when}: a group can produce a few units at most."
        found = run.events("advantage/max", lambda v: v > self.limit, self.limit, note)
        found += run.events("advantage/min", lambda v: v < -self.limit, -self.limit, note)
        small = run.number("rollout.group_size") <= 4
        nan = next(iter(run.events(run.first_of(*GRAD), np.isnan, 0.0, "The gradient norm became NaN {when}.")), None)
        quiet = run.first_of(*GRAD).finite
        if small and nan and len(quiet) >= TREND:
            note = f"The gradient norm became NaN at step {nan.onset} after {len(quiet)} quiet rows, with groups of 2 to 4."
            found.append(Evidence(nan.metric, nan.step, nan.value, 0.0, note, "weak", nan.since))
        if small:
            note = "{name} is {value}, with groups of 2 to 4."
            found += probe.above(run, r"\bnan\b.*(iter|step)|(iter|step).*\bnan\b", 0, note)
            found += probe.above(run, r"advantage.*(max|abs)|max.*advantage", self.limit, note)
        return sorted(found, key=lambda item: item.step)
