import numpy as np

from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class AdvantageSignReversed(Rule):
    """Better rollouts have lower advantages.

    ## Symptom
    Within a group the advantage falls as the reward rises; the reward of the run falls although the update works.

    ## Cause
    A sign error: baseline minus reward, a loss whose minus is missing, or a reward that is a cost.

    ## Fix
    advantage = reward - baseline, and the loss is minus advantage x ratio. Check both on a group with one right answer.

    ## References
    Common Pitfalls in RL Post-Training, "sign errors". A correlation below -0.5 in most dumped groups is no chance.
    """

    id = "LL120"
    name = "advantage-sign-reversed"
    severity = "error"
    confirm = "Print rewards and advantages of one group side by side."
    sick = (
        RunLog(
            [{"step": 1}],
            samples=[
                {
                    "step": 1,
                    "prompt": f"p{i // 4}",
                    "completion": "a",
                    "reward": float(i % 4),
                    "advantage": -float(i % 4),
                }
                for i in range(16)
            ],
        ),
    )
    healthy = (
        RunLog(
            [{"step": 1}],
            samples=[
                {
                    "step": 1,
                    "prompt": f"p{i // 4}",
                    "completion": "a",
                    "reward": float(i % 4),
                    "advantage": float(i % 4),
                }
                for i in range(16)
            ],
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        matches = []
        for group in rollouts.groups(run):
            reward, advantage = rollouts.column(group, "reward"), rollouts.column(group, "advantage")
            if (
                np.isfinite(reward).all()
                and np.isfinite(advantage).all()
                and np.ptp(reward) > 0
                and np.ptp(advantage) > 0
            ):
                matches.append(float(np.corrcoef(reward, advantage)[0, 1]))
        if len(matches) < 2 or np.median(matches) > -0.5:
            return []
        note = f"In {len(matches)} dumped groups reward and advantage are correlated by {number(float(np.median(matches)))}."
        return [Evidence(rollouts.SOURCE, 0, float(np.median(matches)), -0.5, note, "proof")]
