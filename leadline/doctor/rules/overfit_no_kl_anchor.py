import re

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    reward_rises,
)
from leadline.doctor.view import View


class OverfitNoKlAnchor(Rule):
    """The training reward rises and the held-out reward falls, with nothing that anchors the policy.

    ## Symptom
    Train and held-out reward part ways; beta is 0 and no KL is logged; format and length are unchanged.

    ## Cause
    The policy fits the training prompts (or the quirks of their verifier), seen again and again, without a KL term.

    ## Fix
    Stop at the best held-out reward; add a KL term (`objective.beta` 0.001 to 0.01), more prompts, or fewer passes over them.

    ## References
    Field record. A held-out fall by a twentieth of its best while the training reward rises: leadline's choice.
    """

    id = "LL501"
    name = "overfit-no-kl-anchor"
    severity = "warning"
    sick = (
        RunLog.from_columns(
            {
                "reward/mean": [0.3 + 0.01 * i for i in range(40)],
                "eval/reward_mean": [0.5 - 0.005 * i for i in range(40)],
            },
            {"objective": {"beta": 0.0}},
        ),
        RunLog(
            [{"step": 1, "train_acc": 0.5, "test_acc": 0.44}, {"step": 100, "train_acc": 0.9, "test_acc": 0.31}],
            {"objective": {"beta": 0.0}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {
                "reward/mean": [0.3 + 0.01 * i for i in range(40)],
                "eval/reward_mean": [0.3 + 0.005 * i for i in range(40)],
            },
            {"objective": {"beta": 0.0}},
        ),
    )
    held = r"eval|valid|\bval\b|test|held ?out|heldout|ood|benchmark"

    def examine(self, run: View) -> list[Evidence]:
        if run.number("objective.beta") > 0:
            return []
        reward, scores = run["reward/mean"].finite, run.family(r"eval/(reward_mean|pass_at_\d+|score/.+)")
        found = []
        for name, score in scores.items():
            held = score.finite
            if len(held) >= 3 and reward_rises(run) and held.last < 0.95 * held.high and held.late < held.early:
                note = f"{name} fell from {number(held.high)} to {{value}} while the training reward rose to {number(reward.late)}."
                found.append(run.fact(held, held.last, held.high, note, "strong"))
        moves = probe.changes(run, r"acc|reward|score|pass|solve")
        up = [m for m in moves if not re.search(self.held, m[0].lower().replace("_", " ")) and m[3] > m[2]]
        down = [m for m in moves if re.search(self.held, m[0].lower().replace("_", " ")) and m[3] < 0.97 * m[2]]
        if down and (up or reward_rises(run)):
            name, step, start, end = down[0]
            found.append(
                Evidence(
                    name,
                    step,
                    end,
                    start,
                    f"{name} fell from {number(start)} to {number(end)} while the training score rose.",
                )
            )
        return found
