from collections.abc import Callable

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, when
from leadline.doctor.run_log import RunLog, above, below

GAP = "importance/log_ratio_abs_mean"
SUBJECTS = {
    "importance/ratio_mean": "The mean importance ratio, which should be 1,",
    "importance/ess": "The effective sample size of the importance weights, as a share,",
    GAP: "The mean gap between trainer and engine logprobs, in nats per token,",
}


class RolloutLogprobMismatch(Rule):
    """Engine and trainer disagree about the probability of the sampled tokens.

    ## Symptom
    `importance/ratio_mean` leaves [0.5, 2], `importance/ess` falls below 0.3, or, with nothing stale in the step,
    `importance/log_ratio_abs_mean` is above 0.1 nats. Rewards look healthy while learning stalls or collapses.

    ## Cause
    The engine computes in another dtype or with another implementation of the architecture; it reports logprobs of the
    raw distribution although it samples from a processed one (temperature, top_p, top_k, repetition penalty); it runs
    old weights; or it sees other prompt tokens (two BOS tokens, a text tokenised again).

    ## Fix
    Find the cause at step 1, before any update: run the engine in the dtype of `model.dtype`; make it report processed
    logprobs (vLLM: `logprobs_mode = "processed_logprobs"`); check that weights arrive after each step. Until then
    `objective.importance_level = "token"` with `importance_action = "truncate"` bounds the damage and keeps a gradient.

    ## References
    Bands of verl's documentation: mean ratio in [0.5, 2], effective sample size at least 0.3. 0.1 nats is the limit of
    slime's CI; dense bf16 models show 0.011 to 0.013. Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training". huggingface/trl issue 4159.
    """

    id = "LL301"
    name = "rollout-logprob-mismatch"
    severity = "error"
    needs = ("importance/ratio_mean",)
    sick = (
        RunLog.from_columns({"importance/ratio_mean": [4e-10, 5e-9, 2e-10]}),
        RunLog.from_columns({"importance/ratio_mean": [1.0, 2.1, 3.0, 9.0]}),
        RunLog.from_columns({"importance/ratio_mean": [0.9] * 3, "importance/log_ratio_abs_mean": [0.309] * 3}),
        RunLog.from_columns({"importance/ratio_mean": [1.0] * 3, "importance/ess": [0.2, 0.1, 0.05]}),
    )
    healthy = (
        RunLog.from_columns({"importance/ratio_mean": [1.0, 0.7, 1.9], "importance/log_ratio_abs_mean": [0.012] * 3}),
        RunLog.from_columns({"importance/ratio_mean": [1.0, 2.5, 1.0, 1.0]}),
        RunLog.from_columns(
            {
                "importance/ratio_mean": [1.0] * 3,
                "importance/log_ratio_abs_mean": [0.15] * 3,
                "staleness/max": [2, 2, 2],
            }
        ),
    )
    ratio_low, ratio_high, gap, ess = 0.5, 2.0, 0.1, 0.3

    def examine(self, run: RunLog) -> list[Evidence]:
        stale = {step for step, value in run.series("staleness/max") if value > 0}
        found = [
            *self._broken(run, "importance/ratio_mean", below(self.ratio_low), self.ratio_low),
            *self._broken(run, "importance/ratio_mean", above(self.ratio_high), self.ratio_high),
            *self._broken(run, "importance/ess", below(self.ess), self.ess),
            # stale tokens were drawn from other weights, so a gap is expected of them
            *(e for e in self._broken(run, GAP, above(self.gap), self.gap) if e.step not in stale),
        ]
        return sorted(found, key=lambda evidence: evidence.step)

    def _broken(self, run: RunLog, metric: str, broken: Callable[[float], bool], limit: float) -> list[Evidence]:
        return [
            Evidence(
                metric,
                streak.last,
                streak.value,
                limit,
                f"{SUBJECTS[metric]} was {streak.value:.3g} {when(streak)}; the limit is {limit}.",
            )
            for streak in run.streaks(metric, broken, PERSISTENT)
        ]
