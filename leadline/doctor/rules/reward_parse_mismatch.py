from leadline.doctor.rule import PERSISTENT, Evidence, Rule, Strength
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Series
from leadline.doctor.signals import (
    SPREAD,
)
from leadline.doctor.view import View


class RewardParseMismatch(Rule):
    """The reward cannot find what it looks for in the text, so it is pinned to its minimum.

    ## Symptom
    One reward component (or the whole reward) stays at its lowest value with no spread, from the first step on, for
    every prompt, while completions end normally and look right to a reader.

    ## Cause
    The text that reaches the reward is not the text it expects: a trailing end-of-turn token or white space, stripped
    tags, another answer format, an anchored pattern; or the verifier raises and its exception is read as 0.

    ## Fix
    Call the reward by hand on a logged completion and on a gold answer, which must get the highest reward. Make the
    pattern tolerant of what follows the answer, and let a verifier's exception count as a failed rollout, not as 0.

    ## References
    lsdefine/simple_GRPO issue 19 (end-of-turn token), verl issues 5635 and 3024 (exceptions read as 0). A component that
    does not move in all rows is structural, so one row is enough for a suspicion and three for a finding.
    """

    id = "LL104"
    name = "reward-parse-mismatch"
    severity = "error"
    needs = (("reward/mean",),)
    explains = ("zero-reward-variance-within-group",)
    confirm = "Score a gold answer and a logged completion by hand: the gold answer must get the highest reward."
    sick = (
        RunLog.from_columns(
            {"reward/mean": [0.4, 0.5, 0.6], "reward/format/mean": [-1.0] * 3, "reward/format/std": [0.0] * 3}
        ),
        RunLog.from_columns(
            {"reward/mean": [0.0] * 4, "reward/std": [0.0] * 4, "rollout/truncated_fraction": [0.02] * 4}
        ),
    )
    healthy = (
        RunLog.from_columns({"reward/mean": [0.4, 0.5, 0.6], "reward/format/mean": [0.1, 0.3, 0.5]}),
        RunLog.from_columns(
            {"reward/mean": [0.0] * 4, "reward/std": [0.0] * 4, "rollout/truncated_fraction": [1.0] * 4}
        ),
        RunLog.from_columns(
            {"reward/mean": [2.0] * 4, "reward/format/mean": [1.0] * 4, "reward/format/std": [0.0] * 4}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        parts = run.family(r"reward/(?!mean|std|group_std|max|min)[^/]+/mean")
        found = [
            item for name, part in parts.items() for item in self._pinned(run, part.finite, run[name[:-4] + "std"])
        ]
        whole = run["reward/mean"].finite
        return found or self._pinned(run, whole, run.first_of(*SPREAD))

    def _pinned(self, run: View, part: Series, spread: Series) -> list[Evidence]:
        wide = spread.finite
        flat = len(part) and part.low == part.high and part.low <= 0 and (not len(wide) or wide.high <= 1e-9)
        if not flat or (not len(wide) and len(part) < PERSISTENT):
            return []
        kind: Strength = "strong" if part.name != "reward/mean" and len(part) >= PERSISTENT else "weak"
        note = f"{part.name} was {{value}} in every row, for every completion: nothing ever matched."
        return [run.fact(part, part.low, part.low, note, kind, since=int(part.steps[0]))]

    def against(self, run: View) -> list[Evidence]:
        cut = run["rollout/truncated_fraction"].finite
        if len(cut) and cut.median > 0.9:
            return [run.fact(cut, cut.median, 0.9, "{percent} of the completions were cut off before their answer.")]
        return []
