import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Series
from leadline.doctor.view import View


class FormatRewardDominates(Rule):
    """The policy collects the format reward and gives up on being right.

    ## Symptom
    The format component rises towards its maximum while accuracy falls and completions get shorter; the total reward is
    flat or rises. Texts stay well formed, and KL stays moderate.

    ## Cause
    Format points are added to accuracy points. After normalisation within the group a lone format point weighs as much
    as a right answer, and it is far easier to get.

    ## Fix
    Pay for format only together with a right answer (multiply, or gate), or lower its weight to a tenth (`rewards.weight`).
    Watch accuracy on its own, not the sum.

    ## References
    allenai/open-instruct pull 659, huggingface/open-r1 issues 255 and 373. Rise and fall of a quarter of the value: leadline's
    choice; three rows are enough because two curves move against each other.
    """

    id = "LL107"
    name = "format-reward-dominates"
    severity = "error"
    confirm = "Plot accuracy of completions with and without the right format."
    sick = (
        RunLog.from_columns({"reward/format/mean": [0.47, 0.55, 0.86], "reward/accuracy/mean": [0.16, 0.12, 0.06]}),
        RunLog([{"step": 1}], {"raw": {"reward": "format + verification, added"}}),
    )
    healthy = (
        RunLog.from_columns({"reward/format/mean": [0.47, 0.55, 0.86], "reward/accuracy/mean": [0.16, 0.18, 0.22]}),
        RunLog.from_columns({"reward/format/mean": [0.9, 0.9, 0.9], "reward/accuracy/mean": [0.16, 0.10, 0.15]}),
        RunLog.from_columns({"reward/format/mean": [0.9, 0.91], "reward/hint/mean": [0.7, 0.6]}),
    )

    def examine(self, run: View) -> list[Evidence]:
        formats = run.family(r"reward/[^/]*(format|tag|xml|struct)[^/]*/mean").values()
        rights = run.family(r"reward/[^/]*(accura|correct|answer|math|verif|pass|solve)[^/]*/mean").values()
        up = [part for part in formats if len(part.finite) >= PERSISTENT and self._moved(part) >= 0.25]
        down = [part for part in rights if len(part.finite) >= PERSISTENT and self._moved(part) <= -0.25]
        if not up or not down:
            return []
        note = f"{up[0].name} rose from {number(up[0].first)} to {{value}}"
        return [
            run.fact(up[0], up[0].last, up[0].first, note + ".", since=int(up[0].steps[0])),
            run.fact(down[0], down[0].last, down[0].first, f"{down[0].name} fell meanwhile to {{value}}."),
        ]

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(
            r"format.*(\+|add|plus|sum).*(verif|accura|correct)|(verif|accura|correct).*(\+|add|plus).*format"
        )
        if said is None:
            return []
        return [Evidence("rewards", 0, 1.0, 0.0, f"Format and correctness are added ({said}).", "weak")]

    @staticmethod
    def _moved(part: Series) -> float:
        values = part.finite.values
        third = max(1, len(values) // 3)
        start, end = float(np.mean(values[:third])), float(np.mean(values[-third:]))
        steps = np.diff(values)
        noise = 0.0 if len(values) < 6 else 3 * part.noise
        if abs(end - start) <= noise or (len(values) < 6 and not (np.all(steps >= 0) or np.all(steps <= 0))):
            return 0.0
        return (end - start) / max(abs(start), abs(end), 1e-9)
