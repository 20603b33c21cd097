import math

import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, Strength
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    ENTROPY,
    GRAD,
    KL,
    reward_falls,
)
from leadline.doctor.view import View


class UpdatesSkipped(Rule):
    """Optimizer steps are skipped silently, row after row.

    ## Symptom
    The gradient norm is NaN in most rows while reward, entropy and loss look healthy and do not change; or the trainer says
    itself that updates fail.

    ## Cause
    The trainer drops an update whose gradient is not finite, prints a line, and goes on. Nothing is learned.

    ## Fix
    Find the source of the NaN (a masked token times infinity, half precision, an empty micro-batch); stop the run after three
    skipped updates in a row.

    ## References
    verl issue 1037 (grad_norm NaN each step, reward 0.9). Half of the rows: leadline's choice.
    """

    id = "LL430"
    name = "updates-skipped"
    severity = "error"
    needs = ((*GRAD, "optimizer/update_successful"),)
    explains = ("nan-poisoned-weights",)
    sick = (
        RunLog.from_columns(
            {
                "optimizer/grad_norm": [math.nan] * 6,
                "reward/mean": [0.90, 0.91, 0.9, 0.92, 0.9, 0.91],
                "policy/entropy": [0.218] * 6,
            }
        ),
        RunLog.from_columns({"optimizer/update_successful": [0.0] * 4}),
    )
    healthy = (
        RunLog.from_columns(
            {
                "optimizer/grad_norm": [math.nan] * 6,
                "reward/mean": [0.9, 0.1, 0.0, 0.0, 0.0, 0.0],
                "policy/entropy": [0.2, math.nan, math.nan, math.nan, math.nan, math.nan],
            }
        ),
        RunLog.from_columns({"optimizer/update_successful": [1.0] * 4}),
    )

    skippers = ("verl", "areal", "skyrl", "roll")
    """Frameworks that leave a step out and go on. Others take it, and healthy curves then only lag behind."""

    def examine(self, run: View) -> list[Evidence]:
        note = "The update failed {when}."
        found = run.lasting("optimizer/update_successful", lambda v: v < 0.5, 1.0, note, strength="proof")
        grad, reward, entropy = run.first_of(*GRAD), run["reward/mean"], run.first_of(*ENTROPY, *KL)
        bad = grad.where(np.isnan(grad.values))
        if run.has("optimizer/discarded_steps") or len(grad) < PERSISTENT or len(bad) < 0.5 * len(grad):
            return found
        alive = len(reward) and np.isfinite(reward.values).all() and len(entropy) and np.isfinite(entropy.values).all()
        if alive and not reward_falls(run):
            kind: Strength = "proof" if run.framework in self.skippers else "weak"
            note = f"The gradient norm is NaN in {len(bad)} of {len(grad)} rows, last at step {bad.step}, while reward and {entropy.name} stay healthy."
            found.append(Evidence(grad.name, bad.step, math.nan, 0.0, note, kind, int(bad.steps[0])))
        return found

    def forbids(self, run: View) -> list[Evidence]:
        grad, entropy = run.first_of(*GRAD), run.first_of(*ENTROPY, *KL)
        if len(grad) and len(entropy) and np.isnan(entropy.values[-1:]).any():
            return [
                Evidence(
                    entropy.name,
                    entropy.step,
                    math.nan,
                    0.0,
                    f"{entropy.name} is NaN too: the weights are poisoned, not spared.",
                )
            ]
        return []
