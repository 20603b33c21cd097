from collections.abc import Sequence

import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import above, below
from leadline.doctor.setup import (
    token_truncation,
)
from leadline.doctor.signals import (
    GAP,
    GAP_GROWTH,
    WEIGHT,
)
from leadline.doctor.view import View


class RolloutLogprobMismatch(Rule):
    """Engine and trainer disagree about the probability of the sampled tokens.

    ## Symptom
    The mean importance ratio leaves [0.5, 2], the effective sample size falls below 0.3, or, with nothing stale in the
    step, engine and trainer logprobs differ by more than 0.1 nats per token. Rewards look healthy while learning stalls.

    ## Cause
    The engine computes in another dtype or with another implementation of the architecture; it reports logprobs of the
    raw distribution although it samples from a processed one (temperature, top_p, top_k, repetition penalty); it runs
    old weights; or it sees other prompt tokens (two BOS tokens, a text tokenised again).

    ## Fix
    Find the cause at step 1, before any update: run the engine in the dtype of `model.dtype`; make it report processed
    logprobs (vLLM: `logprobs_mode="processed_logprobs"`); check that weights arrive after each step. Until then
    token-level truncation ({token}) bounds the damage and keeps a gradient.

    ## References
    Bands of verl's documentation: mean ratio in [0.5, 2], effective sample size at least 0.3. 0.1 nats is the limit of
    slime's CI; dense bf16 models show 0.011 to 0.013. Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training". NeMo-RL reports a multiplicative error above 1.05; 1.3 is leadline's limit for an error.
    """

    id = "LL301"
    name = "rollout-logprob-mismatch"
    severity = "error"
    needs = ((*WEIGHT, *GAP_GROWTH, "importance/ess", "importance/prob_correlation"),)
    confirm = "Score one batch with both, before any update: temperature, top_p, shift by one, float32; what closes the gap is the cause."
    sick = (
        RunLog.from_columns({"importance/ratio_mean": [4e-10, 5e-9, 2e-10]}),
        RunLog.from_columns({"importance/ratio_mean": [1.0, 2.1, 3.0, 9.0]}),
        RunLog.from_columns({"importance/ratio_mean": [0.9] * 3, "importance/log_ratio_abs_mean": [0.309] * 3}),
        RunLog.from_columns({"importance/ratio_mean": [1.0] * 3, "importance/ess": [0.2, 0.1, 0.05]}),
        RunLog.from_columns({"importance/mult_prob_error": [1.2, 1.9, 3.0, 8.0]}),
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
    bands = (
        ("importance/ratio_mean", 0.5, 2.0, "The mean importance ratio, which should be 1,"),
        ("importance/ess", 0.3, np.inf, "The effective sample size of the importance weights, as a share,"),
        ("importance/prob_correlation", 0.9, np.inf, "The correlation of engine and trainer probabilities"),
        ("importance/mult_prob_error", 0.0, 1.3, "The multiplicative error of the probabilities"),
        (
            "importance/log_ratio_abs_mean",
            0.0,
            0.1,
            "The mean gap between trainer and engine logprobs, in nats per token,",
        ),
        ("importance/kl_k3", 0.0, 0.05, "The KL between engine and trainer (k3), in nats per token,"),
    )
    drifting = ("importance/log_ratio_abs_mean", "importance/kl_k3")
    """Stale tokens were drawn from other weights, so a gap is expected of them."""

    def examine(self, run: View) -> list[Evidence]:
        stale = run["staleness/max"].finite
        old = set(stale.steps[stale.values > 0].tolist())
        found = []
        for name, low, high, what in self.bands:
            for limit, broken in ((low, below(low)), (high, above(high))):
                note = what + " was {value} {when}; the limit is {limit}."
                found += run.lasting(name, broken, limit, note)
        return sorted((e for e in found if e.metric not in self.drifting or e.step not in old), key=lambda e: e.step)

    def forbids(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP).finite
        if len(gap) >= PERSISTENT and gap.high < 0.03 and not self.examine(run):
            return [run.fact(gap, gap.high, 0.1, "Engine and trainer differ by {value} nats per token at most.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        return super().fix(run, evidence).format(token=token_truncation(run))
