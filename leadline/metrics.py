"""Every canonical quantity once: name, unit, meaning, and the healthy band with its source where there is one.

The trainer writes these names, the doctor reads them, readers translate foreign names to them. No torch here.
Families with a free part (`reward/LABEL/mean`, `time/STAGE_s`, `ledger/STAGE_mass`) are written with the part in
capitals; `find` resolves a concrete name.
"""

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Quantity:
    """Example: Quantity("policy/kl_old", "nats", "k3 of old against policy ...", healthy=(0.0, 1e-8))."""

    name: str
    unit: str
    meaning: str
    healthy: tuple[float, float] | None = None
    source: str = ""


LEDGER_STAGES: tuple[str, ...] = (
    "failed",
    "no_signal",
    "stale",
    "truncated",
    "unscored",
    "low_entropy",
    "importance_masked",
    "importance_shrunk",
    "clipped",
    "ratio_drift",
    "discarded",
    "reached",
)
"""Where the sampled signal can end, in the order in which a token meets the stages. See `ledger.py`."""

_BANDS = "field survey of RL trainers' docs, CI limits and papers, dense bf16, temperature 1"

QUANTITIES: tuple[Quantity, ...] = (
    Quantity("step", "steps", "policy.update calls so far"),
    Quantity("loss", "", "the whole loss of the step, as differentiated; ~0 on policy by construction"),
    Quantity("loss/policy", "", "its policy term"),
    Quantity("loss/kl", "", "its KL term, beta included"),
    Quantity("loss/entropy", "", "its entropy bonus, coefficient included"),
    Quantity("reward/mean", "", "mean reward of the scored rollouts"),
    Quantity("reward/std", "", "std over all scored rollouts"),
    Quantity("reward/group_std", "", "mean over groups of the std within the group: what advantages are made of"),
    Quantity("reward/max", "", "highest reward"),
    Quantity("reward/min", "", "lowest reward"),
    Quantity("reward/LABEL/mean", "", "mean of one component, before its weight"),
    Quantity("reward/LABEL/none_fraction", "", "share of rollouts for which the component had no reward"),
    Quantity("reward/overlong_penalty", "", "mean soft overlong penalty"),
    Quantity(
        "rollout/failed_fraction", "", "share of rollouts that failed (reward raised or timed out, abort)", (0.0, 0.05)
    ),
    Quantity("rollout/unrewarded_fraction", "", "share of rollouts without a reward"),
    Quantity("rollout/zero_signal_fraction", "", "share of groups without any nonzero advantage", (0.0, 0.8)),
    Quantity("rollout/refilled_groups", "groups", "groups drawn to replace ones without signal"),
    Quantity("rollout/tokens", "tokens", "completion tokens sampled for this step"),
    Quantity("rollout/prompt_tokens", "tokens", "prompt tokens, each group's prompt once"),
    Quantity("rollout/length_mean", "tokens", "completion length"),
    Quantity("rollout/length_min", "tokens", "shortest completion"),
    Quantity("rollout/length_max", "tokens", "longest completion"),
    Quantity("rollout/truncated_fraction", "", "share of completions ended by the token limit", (0.0, 0.5)),
    Quantity("rollout/finish_REASON_fraction", "", "share of completions by finish reason"),
    Quantity("rollout/entropy", "nats", "minus the mean rollout logprob: entropy of the sampler, all tokens"),
    Quantity("rollout/unscored_fraction", "", "share of sampled tokens without a rollout logprob", (0.0, 0.0)),
    Quantity("staleness/mean", "steps", "policy version less the token's, over trained tokens"),
    Quantity("staleness/max", "steps", "the same, largest"),
    Quantity("advantage/abs_mean", "", "mean |advantage| over rollouts with a reward"),
    Quantity("advantage/max", "", "largest advantage"),
    Quantity("advantage/min", "", "smallest advantage"),
    Quantity(
        "importance/ratio_mean",
        "",
        "pi_old / mu per scored token, before any truncation or mask",
        (0.5, 2.0),
        "verl docs",
    ),
    Quantity("importance/ratio_min", "", "the same, smallest"),
    Quantity("importance/ratio_max", "", "the same, largest"),
    Quantity("importance/ratio_std", "", "the same, standard deviation", (0.0, 1.0), "verl docs"),
    Quantity("importance/sequence_ratio_mean", "", "product over a completion's scored tokens, before any bound"),
    Quantity("importance/sequence_ratio_min", "", "the same, smallest"),
    Quantity("importance/sequence_ratio_max", "", "the same, largest"),
    Quantity("importance/log_ratio_mean", "nats", "signed mean of log pi_old - log mu per token"),
    Quantity("importance/log_ratio_abs_mean", "nats", "mean |log pi_old - log mu| per token", (0.0, 0.1), _BANDS),
    Quantity("importance/log_ratio_abs_max", "nats", "largest |log pi_old - log mu|"),
    Quantity("importance/kl_k1", "nats", "mean log mu - log pi_old: KL(mu || pi_old), unbiased, may be negative"),
    Quantity("importance/kl_k3", "nats", "mean r - log r - 1 with r = pi_old / mu", (0.0, 1e-2), _BANDS),
    Quantity(
        "importance/ess", "", "effective sample size of the raw token weights, as a share", (0.3, 1.0), "verl docs"
    ),
    Quantity("importance/masked_fraction", "", "share of scored tokens whose weight a bound or veto set to 0"),
    Quantity("importance/truncated_fraction", "", "share of scored tokens whose weight was set to a bound"),
    Quantity("importance/weight_mean", "", "mean weight as applied"),
    Quantity("importance/tokens", "tokens", "tokens that entered the importance metrics"),
    Quantity("policy/ratio_mean", "", "pi_theta / pi_old over trained tokens, last optimizer step of the step"),
    Quantity("policy/ratio_min", "", "the same, smallest, over all optimizer steps"),
    Quantity("policy/ratio_max", "", "the same, largest, over all optimizer steps"),
    Quantity("policy/clip_fraction", "", "share of trained tokens whose gradient the clip removed"),
    Quantity("policy/kl_old", "nats", "k3 of old against policy over trained tokens, all optimizer steps"),
    Quantity(
        "policy/first_ratio_error",
        "",
        "largest |pi_theta / pi_old - 1| of the first optimizer step",
        (0.0, 1e-4),
        "identity",
    ),
    Quantity(
        "policy/first_kl_old", "nats", "k3 of old against policy at the first optimizer step", (0.0, 1e-8), "slime CI"
    ),
    Quantity("policy/first_clip_fraction", "", "clip fraction of the first optimizer step", (0.0, 0.0), "identity"),
    Quantity("policy/entropy", "nats", "mean entropy of the policy at the forwarded tokens"),
    Quantity("policy/tokens", "tokens", "tokens that were forwarded and trained"),
    Quantity("kl/k1", "nats", "policy against reference, k1, over trained tokens"),
    Quantity(
        "kl/k3",
        "nats",
        "policy against reference, k3, over trained tokens",
        (0.0, 1.0),
        "seed: KL > 1 in the first steps",
    ),
    Quantity("optimizer/grad_norm", "", "gradient norm before clipping; NaN for a discarded step"),
    Quantity("optimizer/grad_norm_clipped", "", "the same after clipping"),
    Quantity("optimizer/update_norm", "", "norm of the change of the weights over the norm of the weights"),
    Quantity("optimizer/learning_rate", "", "learning rate of the step"),
    Quantity("optimizer/discarded_steps", "steps", "optimizer steps of this step that were discarded", (0.0, 0.0)),
    Quantity("optimizer/steps", "steps", "optimizer steps taken"),
    Quantity("ledger/sampled_tokens", "tokens", "all completion tokens of the step"),
    Quantity("ledger/sampled_mass", "", "sum over tokens of |advantage| x its share of the loss"),
    Quantity("ledger/STAGE_tokens", "tokens", "tokens that ended at the stage"),
    Quantity("ledger/STAGE_mass", "", "mass that ended at the stage; the stages add up to sampled"),
    Quantity("ledger/STAGE_share", "", "the same over sampled mass; NaN when nothing was sampled with signal"),
    Quantity("eval/reward_mean", "", "mean reward on held-out prompts"),
    Quantity("eval/reward/LABEL/mean", "", "mean of one component on held-out prompts"),
    Quantity("eval/pass_at_K", "", "share of held-out prompts solved in K tries (unbiased, Chen et al. 2021)"),
    Quantity("eval/length_mean", "tokens", "completion length on held-out prompts"),
    Quantity("eval/truncated_fraction", "", "share of held-out completions ended by the token limit"),
    Quantity("eval/scored", "rollouts", "held-out rollouts that have a reward"),
    Quantity("time/STAGE_s", "s", "wall seconds of a stage"),
    Quantity("throughput/sampled_tokens_per_s", "tokens/s", "completion tokens sampled per second of generation"),
    Quantity("throughput/trained_tokens_per_s", "tokens/s", "trained tokens per second of update"),
    Quantity("memory/peak_bytes", "bytes", "peak memory: of the accelerator, or resident set of the process"),
)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Quantity], ...]:
    return tuple(
        (re.compile(re.sub(r"[A-Z]+", r"[^/]+", q.name) if re.search(r"[A-Z]", q.name) else re.escape(q.name)), q)
        for q in QUANTITIES
    )


def find(name: str) -> Quantity | None:
    """The quantity that a concrete metric name belongs to, e.g. `time/generate_s`; None for an unknown name."""
    return next((q for pattern, q in _patterns() if pattern.fullmatch(name)), None)
