import numpy as np

from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.view import View


class WrongGrouping(Rule):
    """Advantages are not computed among completions of the same prompt.

    ## Symptom
    The mean advantage is not about 0 and equals the reward (groups of one), an advantage is larger than (G - 1) / sqrt(G),
    which a group of G cannot produce, or no group ever agrees although rewards are 0/1 and prompts easy or hard.

    ## Cause
    Each row got its own group id, `group_size` is 1, or the reshape to groups mixes prompts. The baseline is then no
    baseline, and the method a plain policy gradient.

    ## Fix
    Give all copies of a prompt one id, keep them adjacent, and use more than one completion per prompt
    (`rollout.group_size`). Within each group advantages must sum to 0.

    ## References
    PeterGriffinJin/Search-R1 issues 39 and 88; verl takes a group of one as mean 0, std 1. The bound (G - 1) / sqrt(G) is exact
    for a std with Bessel's correction, (G - 1)^0.5 without it; leadline uses the larger.
    """

    id = "LL112"
    name = "wrong-grouping"
    severity = "error"
    confirm = "Group logged completions by prompt id: within each group the advantages must sum to 0."
    sick = (
        RunLog.from_columns({"advantage/mean": [0.4, 0.5, 0.45], "reward/mean": [0.4, 0.5, 0.45]}),
        RunLog([], {"rollout": {"group_size": 1}}),
        RunLog.from_columns({"advantage/max": [7.0] * 3}, {"rollout": {"group_size": 8}}),
        RunLog([{"step": 1, "group_members": 1.0}]),
    )
    healthy = (
        RunLog.from_columns({"advantage/mean": [0.0, -0.04, 0.01], "reward/mean": [0.4, 0.5, 0.45]}),
        RunLog.from_columns({"advantage/max": [1.8] * 3}, {"rollout": {"group_size": 5}}),
        RunLog.from_columns(
            {"advantage/mean": [0.4, 0.5, 0.45], "reward/mean": [0.4, 0.5, 0.45]}, {"raw": {"adv_estimator": "gae"}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        steps, mean, reward = paired(run["advantage/mean"], run["reward/mean"])
        if (
            len(steps)
            and np.all(np.abs(mean) > 0.05)
            and np.allclose(mean, reward, rtol=0.02)
            and not self._critic(run)
        ):
            note = "The mean advantage ({value}) is the mean reward: each completion is a group of its own."
            found.append(run.fact(run["advantage/mean"], float(mean[-1]), 0.0, note, "proof"))
        size, highest = run.number("rollout.group_size"), run["advantage/max"].finite
        if size >= 2 and len(highest) and not self._critic(run) and highest.median > 1.05 * np.sqrt(size - 1) + 0.05:
            note = f"Advantages reach {{value}}; a group of {number(size)} allows {{limit}}."
            found.append(run.fact(highest, highest.median, float(np.sqrt(size - 1)), note, "strong"))
        pattern = r"(group|uid|prompt).*(members|per group|group size|rows)|singleton"
        for name, series in run.measured(pattern):
            if len(series.finite) and series.high == 1 and "num" not in name:
                found.append(run.fact(series, 1.0, 2.0, f"{name} is {{value}}: groups of one."))
        return found

    def lint(self, run: View) -> list[Evidence]:
        if run.number("rollout.group_size") == 1 and not self._critic(run):
            note = "{option} is {value}: a group of one has no baseline."
            return [run.chosen("rollout.group_size", 2, note, "strong")]
        said = run.says(r"(uid|prompt_id|group_id|index)\w*.*(per row|per sample|not shared|unique per|random)")
        return [Evidence("grouping", 0, 1.0, 0.0, f"Copies of a prompt do not share an id ({said}).")] if said else []

    @staticmethod
    def _critic(run: View) -> bool:
        return run.says(r"\bgae\b|= (ppo|reinforce)|critic") is not None or run.has("loss/value")

    def measure(self, run: View) -> list[Evidence]:
        sums = [rollouts.column(group, "advantage") for group in rollouts.groups(run)]
        off = [abs(float(a.mean())) for a in sums if np.isfinite(a).all() and np.ptp(a) > 0]
        if len(off) < 2 or np.median(off) < 0.2:
            return []
        note = (
            f"In {len(off)} dumped groups the mean advantage is {number(float(np.median(off)))} in size; it must be 0."
        )
        return [Evidence(rollouts.SOURCE, 0, float(np.median(off)), 0.2, note)]
