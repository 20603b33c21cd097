from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    reward_falls,
    reward_rises,
)
from leadline.doctor.view import View


class RewardHackingNontermination(Rule):
    """The reward is high because completions never end.

    ## Symptom
    Reward high or rising while the truncated share goes to 1 and completed answers vanish.

    ## Cause
    The reward pays for length, for effort, or for anything else that a completion collects without ever finishing.

    ## Fix
    Pay only for completed answers: subtract for truncation (`objective.overlong_buffer`), or give truncated completions
    the lowest reward. Report the reward of completed answers by itself.

    ## References
    Yu et al. 2025, DAPO (arXiv 2503.14476), overlong shaping. Truncated share 0.2 to 0.8 with a rising reward: leadline's
    choice.
    """

    id = "LL109"
    name = "reward-hacking-nontermination"
    severity = "error"
    needs = ("reward/mean", ("rollout/truncated_fraction",))
    explains = ("truncation-rate-high-unresolved",)
    sick = (
        RunLog.from_columns(
            {
                "reward/mean": [0.1, 0.2, 0.4, 0.5, 0.7, 0.8, 0.9, 0.9],
                "rollout/truncated_fraction": [0.1, 0.1, 0.3, 0.6, 0.8, 0.9, 1.0, 1.0],
            }
        ),
    )
    healthy = (
        RunLog.from_columns({"reward/mean": [0.1, 0.2, 0.4, 0.5, 0.7, 0.8], "rollout/truncated_fraction": [0.1] * 6}),
        RunLog.from_columns(
            {
                "reward/mean": [0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
                "rollout/truncated_fraction": [0.1, 0.3, 0.5, 0.7, 0.9, 1.0],
            }
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        cut, reward = run["rollout/truncated_fraction"].finite, run["reward/mean"].finite
        few = 2 <= len(cut) < 6 and len(reward) >= 2 and reward.last > reward.first
        if cut.late < 0.8 or not cut.rises(0.3) or not (few or (len(cut) >= 6 and reward_rises(run))):
            return []
        return [
            run.fact(cut, cut.late, 0.8, f"The truncated share rose from {number(cut.early)} to {{value}}."),
            run.fact(
                reward,
                reward.late,
                reward.early,
                f"The reward rose meanwhile from {number(reward.early)} to {{value}}.",
            ),
        ]

    def measure(self, run: View) -> list[Evidence]:
        note = "{name} is {value} while completions do not end."
        ends = probe.above(
            run, r"(trunc|cap|unfinished|never).*(pct|percent|frac|rate|ratio)|nontermin", 0.9, note, "weak"
        )
        raw = [
            Evidence(name, run[name].step, end, start, f"{name} rose from {number(start)} to {number(end)}.", "weak")
            for name, _, start, end in probe.changes(run, r"raw reward|reward raw|reward mean|mean reward|train reward")
            if end > start
        ]
        return [*ends, *raw] if ends and raw else []

    def forbids(self, run: View) -> list[Evidence]:
        reward = run["reward/mean"].finite
        if len(reward) and reward_falls(run):
            return [run.fact(reward, reward.last, reward.high, "The reward fell to {value}, so nothing is won by it.")]
        return []
