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

_BANDS = "survey of RL trainers' docs, CI limits and papers, dense bf16, temperature 1"

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
    Quantity(
        "rollout/failed_fraction", "", "share of rollouts that failed (reward raised or timed out, abort)", (0.0, 0.05)
    ),
    Quantity("rollout/unrewarded_fraction", "", "share of rollouts without a reward"),
    Quantity("rollout/zero_signal_fraction", "", "share of groups without any nonzero advantage", (0.0, 0.8)),
    Quantity("rollout/refilled_groups", "groups", "groups drawn to replace ones without signal"),
    Quantity("rollout/replayed_groups", "groups", "groups of earlier steps that stood in for ones without signal"),
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
    Quantity("staleness/AGE/tokens", "tokens", "scored tokens of this age (age_0, age_1, ... and age_8_or_more)"),
    Quantity("staleness/AGE/log_ratio_abs_mean", "nats", "mean |log pi_old - log mu| of these tokens"),
    Quantity("staleness/AGE/ess", "", "effective sample size of their raw token weights, as a share"),
    Quantity("staleness/AGE/weight_mean", "", "mean of their weights as applied"),
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
    Quantity("mismatch/numerics", "nats", "mean |log pi - log mu| of fresh completions, as far as rounding makes it"),
    Quantity(
        "mismatch/staleness", "nats", "by how much the step's own |log pi_old - log mu| exceeds that of fresh ones"
    ),
    Quantity("mismatch/bug", "nats", "the rest of the fresh gap: neither rounding nor age", (0.0, 1e-2), _BANDS),
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
        "Common Pitfalls in RL Post-Training",
    ),
    Quantity("optimizer/grad_norm", "", "gradient norm before clipping; NaN for a discarded step"),
    Quantity("optimizer/grad_norm_clipped", "", "the same after clipping"),
    Quantity("optimizer/update_norm", "", "norm of the change of the weights over the norm of the weights"),
    Quantity("optimizer/learning_rate", "", "learning rate of the step"),
    Quantity("optimizer/discarded_steps", "steps", "optimizer steps of this step that were discarded", (0.0, 0.0)),
    Quantity("optimizer/steps", "steps", "optimizer steps taken"),
    Quantity("ledger/sampled_tokens", "tokens", "all completion tokens of the step"),
    Quantity("ledger/sampled_mass", "", "sum over tokens of |advantage| x its share of the loss"),
    Quantity("ledger/replayed_tokens", "tokens", "of all tokens of the step, those of groups that were replayed"),
    Quantity("ledger/replayed_mass", "", "the same of sampled mass"),
    Quantity("ledger/STAGE_tokens", "tokens", "tokens that ended at the stage"),
    Quantity("ledger/STAGE_mass", "", "mass that ended at the stage; the stages add up to sampled"),
    Quantity("ledger/STAGE_share", "", "the same over sampled mass; NaN when nothing was sampled with signal"),
    Quantity("eval/reward_mean", "", "mean reward on held-out prompts"),
    Quantity("eval/reward/LABEL/mean", "", "mean of one component on held-out prompts"),
    Quantity("eval/pass_at_K", "", "share of held-out prompts solved in K tries (unbiased, Chen et al. 2021)"),
    Quantity("eval/length_mean", "tokens", "completion length on held-out prompts"),
    Quantity("eval/truncated_fraction", "", "share of held-out completions ended by the token limit"),
    Quantity("eval/scored", "rollouts", "held-out rollouts that have a reward"),
    Quantity("eval/loss", "nats", "fine-tuning: mean -log pi over the tokens of held-out demonstrations"),
    Quantity("eval/perplexity", "", "its exponential"),
    Quantity("eval/tokens", "tokens", "completion tokens of the held-out demonstrations"),
    Quantity("data/epoch", "", "fine-tuning: passes over the training demonstrations so far"),
    Quantity("time/STAGE_s", "s", "wall seconds of a stage"),
    Quantity("time/wait_for_rollouts_s", "s", "of the step, the trainer was idle until its groups were there"),
    Quantity("time/wait_for_trainer_s", "s", "of the step, no group was under way: the trainer had to free slots"),
    Quantity("time/overlap_share", "", "share of the step in which groups were under way while the trainer worked"),
    Quantity("throughput/sampled_tokens_per_s", "tokens/s", "completion tokens of the step per second of the step"),
    Quantity("throughput/trained_tokens_per_s", "tokens/s", "trained tokens per second of update"),
    Quantity("memory/peak_bytes", "bytes", "peak memory: of the accelerator, or resident set of the process"),
)


FOREIGN: tuple[Quantity, ...] = (
    Quantity("loss/value", "", "loss of the value model"),
    Quantity("loss/auxiliary", "", "auxiliary terms, such as the load balance of experts"),
    Quantity("reward/shaped_mean", "", "mean of what advantages are made from: after shaping, KL or normalisation"),
    Quantity("reward/LABEL/std", "", "std of one component over all rollouts"),
    Quantity("reward/LABEL/min", "", "lowest value of one component"),
    Quantity("reward/LABEL/max", "", "highest value of one component"),
    Quantity(
        "reward/zero_std_fraction", "", "share of rollouts whose group the framework found without spread", (0.0, 0.8)
    ),
    Quantity("reward/zero_std_groups", "groups", "groups that the framework found without spread"),
    Quantity("reward/all_failed_fraction", "", "share of groups in which every rollout failed (reward 0)"),
    Quantity("reward/all_solved_fraction", "", "share of groups in which every rollout succeeded (reward 1)"),
    Quantity("reward/mixed_fraction", "", "share of groups with successes and failures"),
    Quantity("reward/pass_at_K", "", "share of training prompts solved in K tries"),
    Quantity("rollout/filter_pass_fraction", "", "share of groups that dynamic sampling kept"),
    Quantity("rollout/filtered_groups", "groups", "groups or samples that a filter removed for lack of signal"),
    Quantity("rollout/trainable_groups", "groups", "groups of the step that carry a signal"),
    Quantity("rollout/dropped_samples", "", "samples or groups discarded as stale or failed"),
    Quantity("rollout/aborted_fraction", "", "share of completions that were aborted"),
    Quantity("rollout/stopped_fraction", "", "share of completions that ended by themselves"),
    Quantity("rollout/repetition_fraction", "", "share of completions that repeat themselves"),
    Quantity("rollout/length_std", "tokens", "std of the completion length"),
    Quantity("rollout/length_median", "tokens", "median completion length"),
    Quantity("rollout/terminated_length_mean", "tokens", "length of the completions that ended; 0 if none did"),
    Quantity("rollout/terminated_length_min", "tokens", "the same, shortest"),
    Quantity("rollout/terminated_length_max", "tokens", "the same, longest"),
    Quantity("rollout/total_length_mean", "tokens", "prompt and completion together"),
    Quantity("rollout/total_length_min", "tokens", "the same, shortest"),
    Quantity("rollout/total_length_max", "tokens", "the same, longest"),
    Quantity("rollout/prompt_length_mean", "tokens", "prompt length"),
    Quantity("rollout/prompt_length_min", "tokens", "shortest prompt"),
    Quantity("rollout/prompt_length_max", "tokens", "longest prompt"),
    Quantity("rollout/prompt_truncated_fraction", "", "share of prompts at the prompt limit"),
    Quantity("rollout/turns_mean", "turns", "turns of a conversation"),
    Quantity("rollout/turns_min", "turns", "the same, fewest"),
    Quantity("rollout/turns_max", "turns", "the same, most"),
    Quantity("rollout/tool_calls_mean", "calls", "tool calls per rollout"),
    Quantity("rollout/tool_failure_fraction", "", "share of tool calls that failed"),
    Quantity("rollout/queue_size", "", "rollouts that wait to be trained"),
    Quantity("staleness/min", "steps", "smallest age of the trained rollouts"),
    Quantity("staleness/partial_fraction", "", "share of rollouts sampled by more than one policy version"),
    Quantity("advantage/mean", "", "signed mean of the advantages"),
    Quantity("advantage/std", "", "their standard deviation"),
    Quantity("importance/log_ratio_abs_std", "nats", "std of |log pi_old - log mu|"),
    Quantity("importance/log_ratio_abs_min", "nats", "smallest |log pi_old - log mu|"),
    Quantity(
        "importance/sequence_log_ratio_abs_mean",
        "nats",
        "mean over completions of |mean log ratio|: at most log_ratio_abs_mean",
    ),
    Quantity("importance/sequence_log_ratio_mean", "nats", "signed mean over completions of the mean log ratio"),
    Quantity("importance/sequence_log_ratio_max", "nats", "the same, largest"),
    Quantity("importance/sequence_log_ratio_min", "nats", "the same, smallest"),
    Quantity("importance/geometric_ratio_mean", "", "exp of the mean log ratio of a completion, averaged"),
    Quantity("importance/perplexity_ratio", "", "trainer's perplexity of the rollouts over the engine's", (0.9, 1.1)),
    Quantity("importance/chi2_token", "", "mean squared token weight less 1", (0.0, 1.0), "verl docs"),
    Quantity("importance/chi2_sequence", "", "mean squared sequence weight less 1"),
    Quantity("importance/kl_k3_reverse", "nats", "k3 with r = mu / pi_old"),
    Quantity("importance/kl_weighted", "nats", "mean mu x (log mu - log pi_old) over sampled tokens: less than the KL"),
    Quantity("importance/js_divergence", "nats", "Jensen-Shannon divergence of engine and trainer at sampled tokens"),
    Quantity("importance/mult_prob_error", "", "mean exp |log pi_old - log mu|, at least 1", (1.0, 1.05), "NeMo-RL"),
    Quantity("importance/sequence_mult_prob_error_mean", "", "the same per completion, mean"),
    Quantity("importance/sequence_mult_prob_error_min", "", "the same per completion, smallest"),
    Quantity("importance/sequence_mult_prob_error_max", "", "the same per completion, largest"),
    Quantity("importance/prob_diff_mean", "", "signed mean of pi_old - mu, probabilities and not their logarithms"),
    Quantity("importance/prob_diff_abs_mean", "", "mean |pi_old - mu|, probabilities and not their logarithms"),
    Quantity("importance/prob_diff_abs_max", "", "the same, largest"),
    Quantity("importance/prob_diff_abs_std", "", "the same, standard deviation"),
    Quantity("importance/prob_correlation", "", "correlation of the two probabilities", (0.95, 1.0), _BANDS),
    Quantity("importance/policy_ratio_mean", "", "pi_theta / mu: current policy against the sampler, no old policy"),
    Quantity("importance/weight_min", "", "smallest weight as applied, after bounds and masks"),
    Quantity("importance/weight_max", "", "largest weight as applied, after bounds and masks"),
    Quantity("importance/weight_std", "", "std of the weights as applied"),
    Quantity("importance/weight_deviation", "", "mean |weight as applied - 1|"),
    Quantity("importance/above_fraction", "", "share of ratios above the upper bound"),
    Quantity("importance/below_fraction", "", "share of ratios below the lower bound"),
    Quantity("importance/out_of_bounds_fraction", "", "share of ratios outside the bounds, either side"),
    Quantity("importance/sequence_masked_fraction", "", "share of completions that a sequence bound removed"),
    Quantity("importance/veto_fraction", "", "share of completions removed for one outlier token"),
    Quantity("importance/masked_sequences", "", "completions removed for their logprob error"),
    Quantity("importance/kept_fraction", "", "share of tokens that all filters of the correction kept"),
    Quantity("importance/scored_fraction", "", "share of sampled tokens for which the engine gave a logprob"),
    Quantity("policy/kl_old_k1", "nats", "signed mean of log pi_old - log pi_theta"),
    Quantity("policy/kl_old_k2", "nats", "half the mean squared log ratio of old and policy"),
    Quantity("policy/ratio_std", "", "std of pi_theta / pi_old"),
    Quantity("policy/ratio_variance", "", "variance of pi_theta / pi_old"),
    Quantity("policy/ratio_clamped_mean", "", "pi_theta / pi_old after the clip"),
    Quantity("policy/clip_low_fraction", "", "share of trained tokens clipped at the lower bound"),
    Quantity("policy/clip_low_fraction_min", "", "the same, smallest of the processes"),
    Quantity("policy/clip_high_fraction", "", "share of trained tokens clipped at the upper bound"),
    Quantity("policy/clip_high_fraction_max", "", "the same, largest of the processes"),
    Quantity("policy/dual_clip_fraction", "", "share clipped by the outer bound for negative advantages"),
    Quantity("policy/off_policy_masked_fraction", "", "share of completions masked for having drifted off policy"),
    Quantity("policy/masked_fraction", "", "share of trained tokens that a trust region on probabilities masked"),
    Quantity("policy/entropy_min", "nats", "smallest token entropy, or mean of a completion"),
    Quantity("policy/entropy_max", "nats", "largest token entropy, or mean of a completion"),
    Quantity("policy/entropy_coefficient", "", "coefficient of the entropy bonus"),
    Quantity("policy/logprob_mean", "nats", "mean log pi_theta of the trained tokens"),
    Quantity("policy/old_logprob_mean", "nats", "mean log pi_old of the trained tokens"),
    Quantity(
        "kl/reference", "nats", "policy against reference, by whichever estimator the run is set to; may be signed"
    ),
    Quantity("kl/max", "nats", "the same, largest token or completion"),
    Quantity("kl/k2", "nats", "half the mean squared log ratio of policy and reference"),
    Quantity("kl/sequence_sum", "nats", "policy against reference, k1 summed over a completion"),
    Quantity("kl/reward_term", "", "KL term inside the reward, coefficient and sign included"),
    Quantity("kl/coefficient", "", "the coefficient in force"),
    Quantity("kl/ref_logprob_mean", "nats", "mean log pi_ref of the trained tokens"),
    Quantity("optimizer/update_successful", "", "1 if the optimizer step was taken", (1.0, 1.0)),
    Quantity("optimizer/value_grad_norm", "", "gradient norm of the value model before clipping"),
    Quantity("optimizer/value_learning_rate", "", "learning rate of the value model"),
    Quantity("eval/loss", "", "loss on held-out prompts"),
    Quantity("eval/reward_std", "", "std of the reward on held-out prompts"),
    Quantity("eval/score/LABEL", "", "a held-out score, under the name that the framework gives it"),
    Quantity("run/epoch", "epochs", "passes over the data so far"),
    Quantity("run/tokens", "tokens", "tokens seen so far"),
    Quantity("run/weight_version", "", "version of the weights that the engine holds"),
    Quantity("throughput/tokens_per_s", "tokens/s", "tokens per second, as the framework counts them"),
    Quantity("throughput/tokens_per_device_s", "tokens/s", "the same, per device"),
    Quantity("throughput/model_flops_fraction", "", "model flops utilisation"),
    Quantity("memory/allocated_bytes", "bytes", "peak memory allocated on the accelerator"),
    Quantity("memory/reserved_bytes", "bytes", "peak memory reserved on the accelerator"),
    Quantity("memory/host_bytes", "bytes", "memory used on the host"),
)
"""Quantities that other frameworks log and leadline measures another way, or has no use for. Readers write them."""


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Quantity], ...]:
    return tuple(
        (re.compile(re.sub(r"[A-Z]+", r"[^/]+", quantity.name)), quantity)
        for quantity in (*QUANTITIES, *FOREIGN)
        if re.search(r"[A-Z]", quantity.name)
    )


@cache
def _by_name() -> dict[str, Quantity]:
    return {quantity.name: quantity for quantity in (*QUANTITIES, *FOREIGN)}


def find(name: str) -> Quantity | None:
    """The quantity that a concrete metric name belongs to, e.g. `time/generate_s`; None for an unknown name."""
    exact = _by_name().get(name)
    return exact or next((quantity for pattern, quantity in _patterns() if pattern.fullmatch(name)), None)
