import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    GAP,
    GAP_GROWTH,
    GRAD,
    reward_falls,
)
from leadline.doctor.view import View


class TrainInferMismatchCollapse(Rule):
    """After a long healthy phase mismatch and gradient norm explode together, and the reward collapses.

    ## Symptom
    Hundreds of good steps; then the engine-trainer KL (k3) and the gradient norm rise by an order of magnitude within a few
    steps, and the reward falls. Low-probability tokens carry it; long completions make it likelier.

    ## Cause
    A small mismatch between engine and trainer is amplified by training: updates favour tokens about which the two disagree.

    ## Fix
    Go back to a checkpoint before the rise. Close the gap (same dtype, float32 head, same attention kernels), and mask
    completions by the geometric mean of their ratios rather than truncate per token.

    ## References
    Liu & Li et al. 2025, "When speed kills stability" (k3 leads the gradient norm), verl issue 3597, NovaSky-AI/SkyRL issue 1665. Ten times
    the earlier mismatch and five times the gradient norm, after 20 rows: leadline's choice.
    """

    id = "LL317"
    name = "train-infer-mismatch-collapse"
    severity = "error"
    explains = (
        "rollout-logprob-mismatch",
        "learning-rate-too-high",
        "kl-drift-reward-collapse",
        "entropy-explosion",
        "offpolicy-uncorrected",
    )
    confirm = "Did the mismatch rise before the gradient norm? Then it leads."
    sick = (
        RunLog.from_columns(
            {
                "importance/kl_k3": [0.001] * 40 + [0.004, 0.05, 0.4, 0.9],
                "optimizer/grad_norm": [0.3] * 40 + [0.5, 2.0, 9.0, 30.0],
                "reward/mean": [0.5] * 40 + [0.45, 0.3, 0.1, 0.0],
            }
        ),
        RunLog([{"step": 1, "response_tokens": 2000, "crash": 0}, {"step": 2, "response_tokens": 8000, "crash": 1}]),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/kl_k3": [0.001] * 44, "optimizer/grad_norm": [0.3] * 44, "reward/mean": [0.5] * 44}
        ),
        RunLog.from_columns(
            {"importance/kl_k3": [0.001] * 40 + [0.004] * 4, "optimizer/grad_norm": [0.3] * 40 + [9.0] * 4}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        gap, grad = run.first_of("importance/kl_k3", *GAP_GROWTH).finite, run.first_of(*GRAD).finite
        if not gap.is_trend or not grad.is_trend:
            return self._crashes(run)
        before = gap.head(len(gap) // 2).median
        after = gap.tail(max(3, len(gap) // 10))
        usual = grad.head(len(grad) // 2).median
        late = grad.tail(max(3, len(grad) // 10))
        exploded = after.high > 10 * max(before, 1e-6) and after.high > 0.02 and late.high > 5 * usual
        if not exploded or not (reward_falls(run) or not run.has("reward/mean")):
            return []
        onset = int(gap.steps[np.flatnonzero(gap.values > 5 * max(before, 1e-6))[0]])
        return [
            run.fact(gap, after.high, 10 * before, f"{gap.name} rose from {number(before)} to {{value}}.", since=onset),
            run.fact(grad, late.high, 5 * usual, f"The gradient norm rose with it from {number(usual)} to {{value}}."),
        ]

    @staticmethod
    def _crashes(run: View) -> list[Evidence]:
        """Runs that crash only with long responses."""
        lengths = [s for _, s in run.measured(r"(response|completion|output|gen).*(token|len)")]
        for name, crash in run.measured(r"crash|collapse|diverge"):
            for length in lengths:
                steps, failed, tokens = paired(crash, length)
                if (
                    len(steps) > 1
                    and set(failed) == {0.0, 1.0}
                    and tokens[failed > 0].min() > tokens[failed == 0].max()
                ):
                    note = (
                        f"{name} happens from {number(float(tokens[failed > 0].min()))} tokens on, not with short ones."
                    )
                    return [Evidence(name, crash.step, 1.0, 0.0, note)]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP).finite
        if len(gap) >= TREND and gap.high < 0.03:
            return [run.fact(gap, gap.high, 0.1, "Engine and trainer never differ by more than {value} nats.")]
        return []
