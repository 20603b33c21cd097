import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.view import View


class TruncatedRewardZeroing(Rule):
    """Truncated completions are given a reward of 0, so the reward curve follows truncation, not skill.

    ## Symptom
    The mean reward falls in step with a rising truncated share, while completed answers are as good as before.

    ## Cause
    The reward service answers 0 for every completion that was cut off. Longer answers then look worse in the curve.

    ## Fix
    Report the reward of completed answers by itself. Raise `sampling.max_tokens`, shape the last tokens
    (`objective.overlong_buffer`), or leave truncated completions out of the baseline.

    ## References
    Tencent-Hunyuan/UniRL pull 19 (0.53 to 0.36 with zeroing; flat without). A correlation below -0.8 over 20 rows is
    leadline's choice.
    """

    id = "LL111"
    name = "truncated-reward-zeroing"
    severity = "warning"
    confirm = "Average the reward of the completions that ended by themselves: is it flat?"
    sick = (
        RunLog.from_columns(
            {
                "reward/mean": [0.6 - 0.01 * i for i in range(30)],
                "rollout/truncated_fraction": [0.1 + 0.015 * i for i in range(30)],
            }
        ),
        RunLog([], {"raw": {"truncated_reward": "zero"}}),
    )
    healthy = (
        RunLog.from_columns(
            {"reward/mean": [0.3 + 0.01 * i for i in range(30)], "rollout/truncated_fraction": [0.1] * 30}
        ),
        RunLog([], {"raw": {"truncated_reward": "none"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        steps, reward, cut = paired(run["reward/mean"], run["rollout/truncated_fraction"])
        if len(steps) < TREND or np.ptp(cut) < 0.2 or np.ptp(reward) <= 0:
            return []
        match = float(np.corrcoef(reward, cut)[0, 1])
        fell = run["reward/mean"].finite
        if match > -0.8 or not fell.falls(0.05):
            return []
        note = f"The reward falls as the truncated share rises (correlation {{value}}, from {number(cut[0])} to {number(cut[-1])})."
        return [run.fact(run["rollout/truncated_fraction"], match, -0.8, note, "strong" if self.lint(run) else "weak")]

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(
            r"(truncat|overlong|unfinished)\w*.*(reward|score).*= ?(zero|0\b|hard zero)|zero.*(on|if|when).*truncat"
        )
        if said is None:
            return []
        return [Evidence("rewards", 0, 0.0, 0.0, f"Truncated completions get a reward of 0 ({said}).")]
