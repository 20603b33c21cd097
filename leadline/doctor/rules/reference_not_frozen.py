import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
    KL,
    reward_rises,
)
from leadline.doctor.view import View


class ReferenceNotFrozen(Rule):
    """The reference moves with the policy, so the KL says nothing.

    ## Symptom
    The KL is pinned at about 0 over the whole run while the policy clearly moves: reward, entropy or length change and the
    gradient norm is healthy.

    ## Cause
    The reference is the same object as the policy, or its parameters are in the optimizer, or an adapter is active in both.

    ## Fix
    Make the reference a distinct, frozen copy (all `requires_grad` false, not in the optimizer), or the base under a disabled
    adapter, and check that the KL rises from 0 after the first steps.

    ## References
    Common Pitfalls in RL Post-Training, "reference model not frozen". A KL below 1e-6 over 20 rows in which the reward rises beyond its noise: leadline's choice.
    """

    id = "LL429"
    name = "reference-not-frozen"
    severity = "error"
    needs = (KL, "reward/mean", GRAD)
    confirm = "Assert that reference and policy are distinct objects, and hash the reference at two steps."
    sick = (
        RunLog.from_columns(
            {
                "kl/k3": [0.0] * 40,
                "reward/mean": [0.2 + 0.01 * i for i in range(40)],
                "optimizer/grad_norm": [0.4] * 40,
            },
            {"objective": {"beta": 0.04}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {
                "kl/k3": [1e-4 * i for i in range(40)],
                "reward/mean": [0.2 + 0.01 * i for i in range(40)],
                "optimizer/grad_norm": [0.4] * 40,
            }
        ),
        RunLog.from_columns({"kl/k3": [0.0] * 40, "reward/mean": [0.2] * 40, "optimizer/grad_norm": [0.0] * 40}),
        RunLog.from_columns(
            {
                "kl/k3": [0.0] * 40,
                "reward/mean": [0.2 + 0.01 * i for i in range(40)],
                "optimizer/grad_norm": [0.4] * 40,
            },
            {"objective": {"beta": 0.0}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        kl, grad = run.first_of(*KL).finite, run.first_of(*GRAD).finite
        if (
            run.number("objective.beta") == 0
            or len(kl) < TREND
            or np.max(np.abs(kl.values)) > 1e-6
            or grad.median < 1e-4
        ):
            return []
        if not reward_rises(run):
            return []
        reward = run["reward/mean"].finite
        note = f"The KL never exceeds {{value}} in {len(kl)} rows while the reward rises from {number(reward.early)} to {number(reward.late)}."
        return [run.fact(kl, float(np.max(np.abs(kl.values))), 1e-6, note, since=int(kl.steps[0]))]

    def forbids(self, run: View) -> list[Evidence]:
        kl = run.first_of(*KL).finite
        if len(kl) > 1 and kl.late > 1e-5:
            return [run.fact(kl, kl.late, 0.0, "The KL is {value}: the reference stays behind.")]
        return []
