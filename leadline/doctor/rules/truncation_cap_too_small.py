from collections.abc import Sequence

import numpy as np

from leadline.doctor.rule import Evidence, Rule, Strength, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Series
from leadline.doctor.signals import (
    SPREAD,
    at_cap,
    cap,
    dead_gradient,
    no_signal,
)
from leadline.doctor.view import View


class TruncationCapTooSmall(Rule):
    """Completions are cut off before the answer, so no completion earns anything.

    ## Symptom
    Nearly all completions are truncated from the first step, their lengths equal `sampling.max_tokens`, the reward is at
    its minimum with no spread, and loss and gradient are 0.

    ## Cause
    The limit is smaller than what the task needs: the answer comes last and is never reached.

    ## Fix
    Raise `sampling.max_tokens` until fewer than a fifth of the completions are cut off (try {double}); shorten what the
    prompt asks for if memory does not allow it.

    ## References
    huggingface/trl issue 5697 (97 % truncated at 256, 14 % at 1024), greyhaven-ai/autocontext pull 1067. Nine tenths
    truncated with a reward that does not move: leadline's choice; structural, so one row is enough.
    """

    id = "LL204"
    name = "truncation-cap-too-small"
    severity = "error"
    needs = (("rollout/truncated_fraction", "rollout/length_mean"), "reward/mean")
    explains = (
        "truncation-rate-high-unresolved",
        "zero-reward-variance-within-group",
        "no-update-grad-and-kl-exactly-zero",
        "reward-parse-mismatch",
        "group-size-too-small",
    )
    sick = (
        RunLog.from_columns(
            {
                "rollout/truncated_fraction": [1.0],
                "rollout/length_mean": [256.0],
                "reward/mean": [0.0],
                "reward/std": [0.0],
            },
            {"sampling": {"max_tokens": 256}},
        ),
        RunLog.from_columns({"rollout/truncated_fraction": [0.97] * 3, "reward/mean": [0.0] * 3}),
    )
    healthy = (
        RunLog.from_columns(
            {
                "rollout/truncated_fraction": [1.0] * 3,
                "reward/mean": [-900.0, -1178.0, -1100.0],
                "reward/std": [263.0] * 3,
            }
        ),
        RunLog.from_columns({"rollout/truncated_fraction": [0.2] * 3, "reward/mean": [0.0] * 3}),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.97] * 3, "rollout/length_mean": [300.0] * 3, "reward/mean": [0.0] * 3},
            {"sampling": {"max_tokens": 2048}},
        ),
    )
    limit = 0.9

    def examine(self, run: View) -> list[Evidence]:
        cut, reward, pinned = run["rollout/truncated_fraction"].finite, run["reward/mean"].finite, at_cap(run)
        if not self._worthless(run, reward):
            return []
        full = cut.head(10)
        found = []
        if len(full) and full.median >= self.limit:
            kind: Strength = "proof" if len(no_signal(run)) or len(dead_gradient(run)) else "strong"
            note = "{percent} of the completions are cut off from the start"
            note += f", and the reward is {number(reward.median)} throughout."
            found.append(run.fact(cut, full.median, self.limit, note, kind, int(cut.steps[0])))
        elif not len(cut) and len(pinned) and pinned.steps[0] == run["rollout/length_mean"].finite.steps[0]:
            note = f"The mean completion is {{value}} tokens, the limit, and the reward {number(reward.median)} throughout."
            found.append(run.fact(pinned, pinned.last, cap(run), note, since=int(pinned.steps[0])))
        return found

    def forbids(self, run: View) -> list[Evidence]:
        cut, length, limit = run["rollout/truncated_fraction"].finite, run["rollout/length_mean"].finite, cap(run)
        if len(cut) and cut.median < 0.5:
            return [run.fact(cut, cut.median, self.limit, "Only {percent} of the completions are cut off.")]
        if len(length) and length.median < 0.9 * limit and not len(at_cap(run)):
            return [
                run.fact(length, length.median, limit, "The mean completion is {value} tokens; the limit is {limit}.")
            ]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        limit = cap(run)
        double = number(4 * limit) if np.isfinite(limit) and limit <= 512 else "twice the limit"
        return super().fix(run, evidence).format(double=double)

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        return run.worded(
            "Do not set `objective.mask_truncated`: all completions are truncated, so nothing would be left."
        )

    @staticmethod
    def _worthless(run: View, reward: Series) -> bool:
        """The reward never left its minimum: constant and not positive, or without any spread."""
        spread = run.first_of(*SPREAD).finite
        if len(spread) and spread.median > 1e-6:
            return False
        return bool(len(reward)) and (np.ptp(reward.values) <= 1e-9 or reward.high <= 0.02) and reward.median <= 0.02
