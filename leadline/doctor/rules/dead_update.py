from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from leadline.doctor.rule import Evidence, Rule, percent
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    STAGE_ADVICE,
    largest_stage,
)
from leadline.doctor.view import View


class DeadUpdate(Rule):
    """Advantages exist, and none of them reaches the gradient.

    ## Symptom
    The loss is exactly 0 and the gradient dead, step after step, while rewards vary. `ledger/reached_share` is below
    0.01 although `ledger/sampled_mass` is positive. A loss near 0 alone is no symptom: on policy, the loss of centred
    advantages is 0 by construction and its gradient is not.

    ## Cause
    One stage between the advantages and the gradient took the signal; the ledger names it.

    ## Fix
    Turn to the stage that the finding names: the largest `ledger/STAGE_share`. `importance_masked` and
    `importance_shrunk`: use token-level truncation and find why engine and trainer disagree. `truncated`: raise
    `sampling.max_tokens`. `clipped` and `ratio_drift`: lower the learning rate. `failed`: mend the reward.

    ## References
    huggingface/trl issue 3452 (a healthy loss of 0) and issue 5814 (one that nearly died). The ledger is an identity: the
    mass that reached equals the absolute gradient of the loss with respect to the token logprobs. The limit of 0.01 over
    three steps is leadline's choice.
    """

    id = "LL403"
    name = "dead-update"
    severity = "error"
    needs = ("ledger/sampled_mass", "ledger/reached_share")
    explains = ("no-update-grad-and-kl-exactly-zero", "gradient-vanishes")
    sick = (
        RunLog.from_columns(
            {
                "loss": [0.0] * 3,
                "optimizer/grad_norm": [0.0] * 3,
                "ledger/sampled_mass": [0.8] * 3,
                "ledger/clipped_share": [1.0] * 3,
                "ledger/reached_share": [0.0] * 3,
            }
        ),
    )
    healthy = (
        RunLog.from_columns(  # on policy: the loss is 0, the gradient is not
            {
                "loss": [1e-9, 0.0, -1e-9],
                "optimizer/grad_norm": [0.8] * 3,
                "ledger/sampled_mass": [0.8] * 3,
                "ledger/reached_share": [0.97] * 3,
            }
        ),
        RunLog.from_columns({"ledger/sampled_mass": [0.0] * 3, "ledger/reached_share": [0.0] * 3}),
    )
    limit = 0.01

    def examine(self, run: View) -> list[Evidence]:
        mass = run["ledger/sampled_mass"].finite
        share = run["ledger/reached_share"]
        with_mass = share.where(np.isin(share.steps, mass.steps[mass.values > 0]))
        note = "{percent} of the signal reached the gradient {when}."
        found = run.lasting(with_mass, lambda v: v < self.limit, self.limit, note, strength="proof")
        return [self._named(run, item) for item in found]

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        stage = largest_stage(run, evidence[0].step)
        return run.worded(STAGE_ADVICE[stage]) if stage else super().fix(run, evidence)

    @staticmethod
    def _named(run: View, item: Evidence) -> Evidence:
        stage = largest_stage(run, item.step)
        if not stage:
            return item
        share = percent(run[f"ledger/{stage}_share"].at(item.step))
        return replace(item, note=f"{item.note} {share} of it ended at {stage.replace('_', ' ')}.")
