import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    ENTROPY,
    ZERO_SIGNAL,
)
from leadline.doctor.view import View


class EntropyCollapse(Rule):
    """The policy loses its diversity: entropy falls towards 0 and learning stops.

    ## Symptom
    Entropy falls to a tenth of where it began, the reward reaches a plateau, and groups agree more and more.

    ## Cause
    Every update sharpens what already works; a clip that is symmetric forbids unlikely tokens to grow; no entropy bonus, no KL,
    a high rate, or stale samples speed it up.

    ## Fix
    Raise the upper clip (`objective.clip_high` 0.28), add a small `objective.entropy_bonus`, lower `optimizer.learning_rate`,
    and go back to a checkpoint with entropy left.

    ## References
    Yu et al. 2025, DAPO (arXiv 2503.14476), clip-higher. Entropy falls in healthy runs too: a finding needs a fall to a tenth, below 0.1 nats,
    and a reward that no longer rises or groups without signal (leadline's choice).
    """

    id = "LL422"
    name = "entropy-collapse"
    severity = "error"
    needs = (ENTROPY,)
    explains = ("zero-reward-variance-within-group", "near-greedy-sampling", "unscored-tokens")
    sick = (
        RunLog.from_columns(
            {
                "policy/entropy": [0.8 * 0.9**i for i in range(60)],
                "reward/mean": [min(0.5, 0.2 + 0.02 * i) for i in range(60)],
                "reward/zero_std_fraction": [min(0.9, 0.2 + 0.02 * i) for i in range(60)],
            }
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"policy/entropy": [0.8 - 0.005 * i for i in range(60)], "reward/mean": [0.2 + 0.01 * i for i in range(60)]}
        ),
        RunLog.from_columns({"policy/entropy": [0.02] * 60, "reward/mean": [0.2] * 60}),
    )

    def examine(self, run: View) -> list[Evidence]:
        entropy = run.first_of(*ENTROPY).finite
        if not entropy.is_trend or entropy.late > 0.1 or entropy.late > 0.1 * entropy.early or entropy.early < 0.05:
            return []
        reward, zero = run["reward/mean"].finite, run.first_of(*ZERO_SIGNAL).finite
        late = reward.tail(max(10, len(reward) // 2))
        stuck = len(reward) < TREND or not late.rises(0.02 * max(abs(late.early), 1e-9))
        starving = len(zero) >= TREND and zero.rises(0.2)
        if not stuck and not starving:
            return []
        onset = int(entropy.steps[np.flatnonzero(entropy.values < 0.2 * entropy.early)[0]])
        found = [
            run.fact(
                entropy, entropy.late, 0.1, f"Entropy fell from {number(entropy.early)} to {{value}} nats.", since=onset
            )
        ]
        if starving:
            found.append(
                run.fact(
                    zero,
                    zero.late,
                    zero.early,
                    f"The share of groups that agree rose from {number(zero.early)} to {{value}}.",
                )
            )
        return found

    def measure(self, run: View) -> list[Evidence]:
        return probe.falls(run, r"entropy", 0.8)

    def forbids(self, run: View) -> list[Evidence]:
        entropy = run.first_of(*ENTROPY).finite
        if len(entropy) >= 3 and entropy.late > 0.2:
            return [run.fact(entropy, entropy.late, 0.1, "Entropy is {value} nats.")]
        return []
