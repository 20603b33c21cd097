from collections.abc import Sequence

from leadline.doctor.rule import Evidence, Rule, Strength
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    inner_updates,
)
from leadline.doctor.signals import (
    ENTROPY,
    reward_falls,
    reward_rises,
)
from leadline.doctor.view import View


class EntropyExplosion(Rule):
    """The policy becomes random: entropy passes 2 nats and stays, and the reward falls.

    ## Symptom
    Entropy climbs above 2 nats; texts end, but are wrong; the reward falls.

    ## Cause
    An entropy bonus that is too large, a raised upper clip, a loss whose positive term is unbounded, many inner updates, or no
    KL at all.

    ## Fix
    {advice} Go back to a checkpoint with an entropy below 1 nat.

    ## References
    huggingface/trl issue 6407 (2 nats as the point of no return), rllm-org/rllm issue 116 (authors regard below 1 as fine). The rise has to
    be at least half of the value: base models can start high.
    """

    id = "LL423"
    name = "entropy-explosion"
    severity = "error"
    needs = (ENTROPY,)
    explains = ("truncation-rate-high-unresolved", "reward-parse-mismatch")
    sick = (
        RunLog.from_columns(
            {"policy/entropy": [0.4 + 0.1 * i for i in range(40)], "reward/mean": [0.6 - 0.015 * i for i in range(40)]}
        ),
        RunLog(
            [{"step": 236, "policy/entropy": 2.0}, {"step": 661, "policy/entropy": 2.0}], {"objective": {"beta": 0.0}}
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"policy/entropy": [0.4 + 0.01 * i for i in range(40)], "reward/mean": [0.2 + 0.01 * i for i in range(40)]}
        ),
        RunLog.from_columns(
            {"policy/entropy": [2.4 - 0.01 * i for i in range(40)], "reward/mean": [0.2 + 0.01 * i for i in range(40)]}
        ),
    )
    limit = 2.0

    def examine(self, run: View) -> list[Evidence]:
        entropy = run.first_of(*ENTROPY).finite
        over = entropy.where(entropy.values >= self.limit)
        if not len(over) or entropy.tail(3).median < self.limit:
            return []
        rose = len(entropy) >= 6 and entropy.late > 1.5 * entropy.early
        short = len(entropy) < 6 and entropy.step > 50 and run.last_step > 50
        if not rose and not short:
            return []
        if reward_rises(run) and not reward_falls(run):
            return []
        apart = int(entropy.steps[-1] - entropy.steps[0]) >= 100  # few rows, far apart: it stays
        kind: Strength = "strong" if rose or (apart and run.number("objective.beta") == 0) else "weak"
        note = f"Entropy is {{value}} nats from step {int(over.steps[0])} on; above {{limit}} a policy seldom returns."
        return [run.fact(over, over.last, self.limit, note, kind, int(over.steps[0]))]

    def forbids(self, run: View) -> list[Evidence]:
        entropy = run.first_of(*ENTROPY).finite
        if len(entropy) >= 3 and entropy.high < 1:
            return [run.fact(entropy, entropy.high, self.limit, "Entropy never exceeds {value} nats.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        advice = []
        if run.number("objective.entropy_bonus") > 0:
            advice.append("Set `objective.entropy_bonus` to 0.")
        if run.number("objective.clip_high") > 0.25:
            advice.append("Lower `objective.clip_high` to 0.2.")
        if inner_updates(run) > 1:
            advice.append("Lower `optimizer.epochs_per_batch` to 1.")
        if run.number("objective.beta") == 0:
            advice.append("Add a KL term (`objective.beta` 0.001 to 0.01).")
        chosen = " ".join(advice) or "Lower `optimizer.learning_rate`, and add a KL term (`objective.beta`)."
        return run.worded(super().fix(run, evidence).format(advice=chosen))
