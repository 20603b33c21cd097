import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class RewardServiceTimesOut(Rule):
    """Now and then the reward of a whole step drops to exactly its minimum.

    ## Symptom
    A run with a healthy reward has isolated steps with a mean reward of exactly 0 (or the lowest value) and no spread.

    ## Cause
    The verifier or reward service timed out or was restarted, and the failure was written as a reward of 0. Those
    steps teach that good answers are bad.

    ## Fix
    Let a failed call count as a failed rollout, not as 0; raise the timeout (`rewards.timeout_s`); watch the count of
    failures.

    ## References
    AReaL issue 548 (a 15 s timeout read as 0). Two such steps in a run whose typical reward is 6 times the noise away:
    leadline's choice.
    """

    id = "LL118"
    name = "reward-service-times-out"
    severity = "warning"
    needs = ("reward/mean",)
    sick = (RunLog.from_columns({"reward/mean": [0.5, 0.52, 0.0, 0.51, 0.53, 0.5, 0.52, 0.55] * 3}),)
    healthy = (
        RunLog.from_columns({"reward/mean": [0.5, 0.52, 0.49, 0.51, 0.53, 0.5, 0.6, 0.55] * 3}),
        RunLog.from_columns({"reward/mean": [0.0, 0.12, 0.0, 0.1, 0.2, 0.0, 0.1, 0.0] * 3}),
        RunLog.from_columns({"reward/mean": [0.5] * 20 + [0.0] * 20}),
    )

    def examine(self, run: View) -> list[Evidence]:
        reward = run["reward/mean"].finite
        if len(reward) < TREND:
            return []
        lowest = run["reward/min"].finite.low
        floor = 0.0 if np.isnan(lowest) else min(0.0, lowest)
        drops = np.flatnonzero(reward.values == floor)
        apart = len(drops) >= 2 and len(drops) < 0.2 * len(reward) and np.all(np.diff(drops) > 1)
        if not apart or abs(reward.median - floor) < max(6 * reward.where(reward.values != floor).noise, 0.05):
            return []
        step = int(reward.steps[drops[-1]])
        note = f"The mean reward was exactly {number(floor)} at {len(drops)} single steps, last at step {step}, and {number(reward.median)} otherwise."
        return [Evidence("reward/mean", step, floor, reward.median, note, since=int(reward.steps[drops[0]]))]
