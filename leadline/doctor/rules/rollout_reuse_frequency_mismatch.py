import numpy as np

from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    inner_updates,
)
from leadline.doctor.view import View


class RolloutReuseFrequencyMismatch(Rule):
    """New rollouts are generated at another rhythm than the settings say.

    ## Symptom
    Reward and length appear in every k-th row only, and k is not the configured number of optimizer steps per generation;
    the time per step shows the same rhythm.

    ## Cause
    A version of the trainer or a library counts micro-batches differently, so batches are reused more, or less, than meant.

    ## Fix
    Compare k with steps per generation times inner epochs (`optimizer.epochs_per_batch`, `optimizer.minibatches`); pin the
    versions that agree.

    ## References
    modelscope/ms-swift issue 9261. A regular k equal to the settings is healthy; without the settings it is only a possibility.
    """

    id = "LL318"
    name = "rollout-reuse-frequency-mismatch"
    severity = "warning"
    needs = ("loss", "reward/mean")
    confirm = "Log a counter of generation batches beside the optimizer step."
    sick = (
        RunLog(
            [{"step": s, "loss": 0.0} | ({"reward/mean": 0.4} if s % 4 == 1 else {}) for s in range(1, 13)],
            {"optimizer": {"epochs_per_batch": 2}},
        ),
        RunLog([{"step": 1, "loss": 0.0, "reward/mean": 0.0}, {"step": 2, "loss": 0.0}]),
    )
    healthy = (
        RunLog(
            [{"step": s, "loss": 0.0} | ({"reward/mean": 0.4} if s % 2 else {}) for s in range(1, 13)],
            {"optimizer": {"epochs_per_batch": 2}},
        ),
        RunLog([{"step": s, "loss": 0.0, "reward/mean": 0.4} for s in range(1, 13)]),
    )

    def examine(self, run: View) -> list[Evidence]:
        loss, reward = run["loss"], run["reward/mean"]
        both = np.isin(loss.steps, reward.steps)
        places = np.flatnonzero(both)
        if len(loss) < 2 or both.all() or not len(places):
            return []
        gaps = np.diff(np.concatenate((places, [len(loss)])))
        if len(gaps) > 1:
            gaps = gaps[:-1]
        every, regular = float(np.median(gaps)), np.mean(gaps == np.median(gaps)) > 0.8
        expected = inner_updates(run)
        reuse = next(
            (float(v) for _, v in run.raw(r"steps_per_generation|num_iterations") if isinstance(v, int | float)),
            expected,
        )
        if not regular or every in (reuse, expected):
            return []
        known = np.isfinite(expected) or np.isfinite(reuse)
        note = f"New rewards appear every {{value}} rows; the settings {'say ' + number(reuse if np.isfinite(reuse) else expected) if known else 'are not known'}."
        return [run.fact(reward, every, reuse, note, "strong" if known else "weak")]
