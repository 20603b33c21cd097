import re

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class RewardSignWrong(Rule):
    """The reward grows with what should shrink: a distance or penalty without its minus sign.

    ## Symptom
    The reward rises steadily while the target moves away: lengths, distances or errors grow.

    ## Cause
    A distance, cost or error is returned as the reward without negation.

    ## Fix
    Negate it (`-abs(...)`), and test the reward with two completions, one clearly better: it must get more.

    ## References
    huggingface/trl issue 2771. It shows in the reward's definition only: no threshold.
    """

    id = "LL108"
    name = "reward-sign-wrong"
    severity = "error"
    confirm = "Score two completions of which one is clearly better: the better must get more."
    sick = (RunLog([], {"raw": {"reward": "absolute distance to 20, no minus sign"}}),)
    healthy = (
        RunLog([], {"raw": {"reward": "minus distance to 20 characters"}}),
        RunLog.from_columns({"reward/mean": [0.1, 0.2]}),
    )

    def examine(self, run: View) -> list[Evidence]:
        return []

    def lint(self, run: View) -> list[Evidence]:
        found = []
        for name, value in run.raw("reward"):
            text = str(value).lower()
            missing = re.search(
                r"(no|without|missing|forgot\w*).{0,12}(minus|negat|sign)|wrong sign|sign (is )?wrong", text
            )
            distance = re.search(r"distance|error|loss|abs\(|deviation", text)
            negated = re.search(r"minus|negativ|-\s*(abs|dist|err|loss)|1\s*-|\bneg", text)
            if missing or (distance and not negated and "distance" in text):
                note = f"{name} is {value!r}: it grows as the target moves away."
                found.append(Evidence(name, 0, 1.0, 0.0, note, "strong" if missing else "weak"))
        return found
