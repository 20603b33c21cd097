import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Series
from leadline.doctor.view import View


class RewardHackingEnvironmentLoophole(Rule):
    """The policy found a way to be paid without solving the task.

    ## Symptom
    After a flat phase the reward jumps to near its maximum within a few steps; solutions become alike; a held-out or
    hidden check disagrees with the training reward.

    ## Cause
    The environment can be gamed: tests that may be overwritten, an answer that is visible, a judge that obeys the text.

    ## Fix
    Read completions from just after the jump. Close the hole (sandbox, read-only tests, hidden checks), and keep a
    second verifier that the policy never sees.

    ## References
    Alignment Forum, "Steering RL training" (a runner that may be overwritten: 79 % hacked). A jump of half the range within
    5 % of the run is leadline's choice, and only a possibility: learning can look the same.
    """

    id = "LL110"
    name = "reward-hacking-environment-loophole"
    severity = "error"
    confirm = "Judge completions from before and after the jump by a verifier that the policy never saw."
    sick = (
        RunLog([{"step": 1, "onset_step": 80, "reward_hack_rate_pct": 79.0}]),
        RunLog.from_columns({"reward/mean": [0.1] * 30 + [0.9] * 30, "eval/reward_mean": [0.1] * 60}),
    )
    healthy = (
        RunLog.from_columns({"reward/mean": [0.1] * 30 + [0.9] * 30}),
        RunLog.from_columns({"reward/mean": [0.1] * 30 + [0.9] * 30, "eval/reward_mean": [0.1] * 30 + [0.8] * 30}),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = probe.above(run, r"hack|loophole|cheat|exploit|tamper|overwrit", 0.2, "{name} was {value}.")
        reward, held = run["reward/mean"].finite, run["eval/reward_mean"].finite
        if len(reward) >= TREND and len(held) >= 2:
            gain, kept = reward.late - reward.early, held.last - held.first
            if gain > 0.2 and gain > 6 * reward.noise and kept < 0.2 * gain:
                note = f"The training reward rose by {number(gain)}, the held-out reward by {{value}}."
                found.append(run.fact(held, kept, gain, note, "strong" if self._jump(reward) else "weak"))
        return found

    @staticmethod
    def _jump(reward: Series) -> bool:
        window = max(2, len(reward) // 20)
        moved = np.abs(reward.values[window:] - reward.values[:-window])
        return bool(moved.max() > 0.5 * np.ptp(reward.values))
