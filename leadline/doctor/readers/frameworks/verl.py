"""verl, and what is built on it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row

GIB = 2.0**30
WIDTH = (
    "share of responses as long as the padded batch: at least one of N when responses are padded to the longest of the "
    "batch instead of max_response_length"
)
PPO_KL = "signed; NaN tokens are not seen by the clip fractions beside it"

KEYS: Mapping[str, str | Key] = {
    "actor/loss": "loss",
    "actor/pg_loss": "loss/policy",
    "critic/vf_loss": "loss/value",
    "actor/grad_norm": "optimizer/grad_norm",
    "actor/lr": "optimizer/learning_rate",
    "critic/grad_norm": "optimizer/value_grad_norm",
    "critic/lr": "optimizer/value_learning_rate",
    "critic/score/mean": "reward/mean",
    "critic/score/max": "reward/max",
    "critic/score/min": "reward/min",
    "critic/rewards/mean": "reward/shaped_mean",
    "critic/advantages/mean": "advantage/mean",
    "critic/advantages/max": "advantage/max",
    "critic/advantages/min": "advantage/min",
    "actor/kl_loss": Key("kl/k3", "k3 with kl_loss_type low_var_kl, the default; another estimator if that is set"),
    "actor/kl_coef": "kl/coefficient",
    "actor/reward_kl_penalty": Key("kl/reference", "the KL inside the reward, before its coefficient"),
    "actor/reward_kl_penalty_coeff": "kl/coefficient",
    "actor/ppo_kl": Key("policy/kl_old_k1", PPO_KL),
    "actor/pg_clipfrac": Key("policy/clip_fraction", "a token whose ratio is NaN counts as not clipped"),
    "actor/pg_clipfrac_lower": Key(
        "policy/dual_clip_fraction", "advantage below 0 and ratio above clip_ratio_c, not the lower side of the clip"
    ),
    "actor/entropy": Key("policy/entropy", "measured by the pass that computes old_log_prob"),
    "actor/entropy_loss": Key("policy/entropy", "mean entropy, before its coefficient"),
    "rollout_corr/kl": Key("importance/kl_k1", "signed"),
    "rollout_corr/k3_kl": "importance/kl_k3",
    "rollout_corr/rollout_is_mean": "importance/ratio_mean",
    "rollout_corr/rollout_is_std": "importance/ratio_std",
    "rollout_corr/rollout_is_min": "importance/ratio_min",
    "rollout_corr/rollout_is_max": "importance/ratio_max",
    "rollout_corr/rollout_is_eff_sample_size": "importance/ess",
    "rollout_corr/rollout_is_ratio_fraction_high": "importance/above_fraction",
    "rollout_corr/rollout_is_ratio_fraction_low": "importance/below_fraction",
    "rollout_corr/rollout_is_oob_ratio": "importance/out_of_bounds_fraction",
    "rollout_corr/rollout_is_seq_mean": "importance/sequence_ratio_mean",
    "rollout_corr/rollout_is_seq_min": "importance/sequence_ratio_min",
    "rollout_corr/rollout_is_seq_max": "importance/sequence_ratio_max",
    "rollout_corr/rollout_rs_masked_fraction": "importance/masked_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction": "importance/sequence_masked_fraction",
    "rollout_corr/chi2_token": "importance/chi2_token",
    "rollout_corr/chi2_seq": "importance/chi2_sequence",
    "rollout_corr/ppl_ratio": "importance/perplexity_ratio",
    "rollout_corr/log_ppl_diff": Key("importance/sequence_log_ratio_mean", "log mu - log pi_old in verl", factor=-1),
    "rollout_corr/log_ppl_abs_diff": "importance/sequence_log_ratio_abs_mean",
    "rollout_corr/log_ppl_diff_max": Key("importance/sequence_log_ratio_min", factor=-1),
    "rollout_corr/log_ppl_diff_min": Key("importance/sequence_log_ratio_max", factor=-1),
    "training/rollout_probs_diff_mean": "importance/prob_diff_abs_mean",
    "training/rollout_probs_diff_max": "importance/prob_diff_abs_max",
    "training/rollout_probs_diff_std": "importance/prob_diff_abs_std",
    "training/rollout_actor_probs_pearson_corr": "importance/prob_correlation",
    "response_length/mean": "rollout/length_mean",
    "response_length/max": "rollout/length_max",
    "response_length/min": "rollout/length_min",
    "response_length/clip_ratio": Key("rollout/truncated_fraction", WIDTH),
    "response/aborted_ratio": "rollout/aborted_fraction",
    "prompt_length/mean": "rollout/prompt_length_mean",
    "prompt_length/max": "rollout/prompt_length_max",
    "prompt_length/min": "rollout/prompt_length_min",
    "prompt_length/clip_ratio": "rollout/prompt_truncated_fraction",
    "num_turns/mean": "rollout/turns_mean",
    "num_turns/min": "rollout/turns_min",
    "num_turns/max": "rollout/turns_max",
    "training/off_policy/trajectory_staleness/mean": "staleness/mean",
    "training/off_policy/trajectory_staleness/max": "staleness/max",
    "training/off_policy/trajectory_staleness/min": "staleness/min",
    "training/filter_groups/evicted_samples": "rollout/filtered_groups",
    "training/off_policy/evicted_samples": "rollout/dropped_samples",
    "training/rollout_failure/evicted_samples": "rollout/dropped_samples",
    "fully_async/count/dropped_stale_samples": "rollout/dropped_samples",
    "fully_async/count/current_param_version": "run/weight_version",
    "fully_async/partial/partial_ratio": "staleness/partial_fraction",
    "training/epoch": "run/epoch",
    "perf/total_num_tokens": "policy/tokens",
    "perf/time_per_step": "time/step_s",
    "timing_s/step": "time/step_s",
    "timing_s/gen": "time/generate_s",
    "timing_s/update_actor": "time/update_s",
    "timing_s/update_weights": "time/load_weights_s",
    "timing_s/reward": "time/reward_s",
    "perf/throughput": "throughput/tokens_per_device_s",
    "perf/mfu/actor": "throughput/model_flops_fraction",
    "actor/perf/max_memory_allocated_gb": Key("memory/allocated_bytes", factor=GIB),
    "actor/perf/max_memory_reserved_gb": Key("memory/reserved_bytes", factor=GIB),
    "actor/perf/cpu_memory_used_gb": Key("memory/host_bytes", factor=GIB),
    "perf/max_memory_allocated_gb": Key("memory/allocated_bytes", factor=GIB),
    "perf/max_memory_reserved_gb": Key("memory/reserved_bytes", factor=GIB),
    "perf/cpu_memory_used_gb": Key("memory/host_bytes", factor=GIB),
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"timing_s/([^/]+)", "time/{0}_s"),
    (r"val(?:-core|-aux)?/(.+)", "eval/score/{0}"),
)

_LINE = re.compile(r"\bstep:(\d+)\s+-\s+(.*)")
_PAIR = re.compile(
    r"([^\s:][^\s]*?):\s*(?:np\.\w+\(|tensor\()?([-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf)|None|null)\)?"
)


def console(lines: Iterator[str]) -> Iterator[Row]:
    """`step:34 - actor/loss:0.1 - ...`, one line for each step."""
    for line in lines:
        match = _LINE.search(line)
        if not match:
            continue
        row: dict[str, Any] = {"step": match[1]}
        for part in re.split(r"\s+-\s+|…", match[2]):
            pair = _PAIR.fullmatch(part.strip(" -"))
            if pair:
                row[pair[1]] = None if pair[2] in ("None", "null") else pair[2]
        if len(row) > 1:
            yield row


OPTIONS = {
    "model.name": "actor_rollout_ref.model.path",
    "model.lora_rank": "actor_rollout_ref.model.lora_rank",
    "model.lora_alpha": "actor_rollout_ref.model.lora_alpha",
    "model.dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
    "model.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "engine.kind": "actor_rollout_ref.rollout.name",
    "engine.dtype": "actor_rollout_ref.rollout.dtype",
    "rollout.group_size": "actor_rollout_ref.rollout.n",
    "rollout.max_staleness": "trainer.v1.sampler.max_off_policy_threshold",
    "sampling.temperature": "actor_rollout_ref.rollout.temperature",
    "sampling.top_p": "actor_rollout_ref.rollout.top_p",
    "sampling.top_k": "actor_rollout_ref.rollout.top_k",
    "sampling.max_tokens": "data.max_response_length",
    "data.max_prompt_tokens": "data.max_prompt_length",
    "data.source": "data.train_files",
    "objective.loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "objective.aggregation": "actor_rollout_ref.actor.loss_agg_mode",
    "objective.advantage_scaling": "algorithm.norm_adv_by_std_in_grpo",
    "objective.beta": "actor_rollout_ref.actor.kl_loss_coef",
    "objective.kl_estimator": "actor_rollout_ref.actor.kl_loss_type",
    "objective.clip_low": "actor_rollout_ref.actor.clip_ratio_low",
    "objective.clip_high": "actor_rollout_ref.actor.clip_ratio_high",
    "objective.clip_delta": "actor_rollout_ref.actor.clip_ratio_c",
    "objective.entropy_bonus": "actor_rollout_ref.actor.entropy_coeff",
    "objective.importance_level": "algorithm.rollout_correction.rollout_is",
    "objective.importance_action": "algorithm.rollout_correction.rollout_is_threshold",
    "objective.importance_high": "algorithm.rollout_correction.rollout_is_threshold",
    "optimizer.learning_rate": "actor_rollout_ref.actor.optim.lr",
    "optimizer.warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "optimizer.max_grad_norm": "actor_rollout_ref.actor.grad_clip",
    "optimizer.weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "optimizer.epochs_per_batch": "actor_rollout_ref.actor.ppo_epochs",
    "run.steps": "trainer.total_training_steps",
}

ALIASES = {
    "actor.lr": "optimizer.learning_rate",
    "actor.optim.clip_grad": "optimizer.max_grad_norm",
    "actor_rollout_ref.actor.optim.clip_grad": "optimizer.max_grad_norm",
    "kl_coef": "objective.beta",
    "algorithm.kl_ctrl.kl_coef": "objective.beta",
    "max_response_length": "sampling.max_tokens",
    "rollout.response_length": "sampling.max_tokens",
    "actor_rollout_ref.rollout.response_length": "sampling.max_tokens",
    "clip_ratio": "objective.clip_low",
    "actor_rollout_ref.actor.clip_ratio": "objective.clip_low",
    "n": "rollout.group_size",
    "model": "model.name",
    "model_path": "model.name",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that verl puts in other words."""
    settings: dict[str, Any] = {}
    if options.get("actor_rollout_ref.actor.use_kl_loss") is False:
        settings["objective.beta"] = 0.0
    threshold = options.get("algorithm.rollout_correction.rollout_is_threshold")
    if "algorithm.rollout_correction.rollout_is" in options:
        level = options["algorithm.rollout_correction.rollout_is"]
        settings["objective.importance_action"] = "off" if level in (None, "null", "") else "truncate"
        if settings["objective.importance_action"] == "off":
            settings["objective.importance_level"] = None
        elif isinstance(threshold, str) and "_" in threshold:
            settings["objective.importance_action"] = "mask"
            low, _, high = threshold.partition("_")
            settings |= {"objective.importance_low": float(low), "objective.importance_high": float(high)}
    normalised = options.get("algorithm.norm_adv_by_std_in_grpo")
    if isinstance(normalised, bool):
        settings["objective.advantage_scaling"] = "group_std" if normalised else "none"
    estimator = options.get("actor_rollout_ref.actor.kl_loss_type")
    if estimator is not None:
        named = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
        settings["objective.kl_estimator"] = named.get(str(estimator), str(estimator))
    return settings


LOGPROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"
CORRECTION = "algorithm.rollout_correction.rollout_is=token (needs actor_rollout_ref.rollout.calculate_log_probs=True)"

VERL = Framework(
    name="verl",
    words=("verl", "rllm", "search-r1", "agent-r1"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "training/global_step", "global_step", "_step", "Step"),
    marks=(r"\bstep:\d+\s+-\s+(?:…|\S+:)",),
    console=console,
    could_log={
        "kl/k3": "actor_rollout_ref.actor.use_kl_loss=True",
        "importance/kl_k1": LOGPROBS,
        "importance/kl_k3": LOGPROBS,
        "importance/prob_diff_abs_mean": LOGPROBS,
        "importance/prob_correlation": LOGPROBS,
        "importance/ratio_mean": CORRECTION,
        "importance/ratio_min": CORRECTION,
        "importance/ratio_max": CORRECTION,
        "importance/ess": CORRECTION,
        "importance/masked_fraction": "algorithm.rollout_correction.rollout_rs",
        "staleness/mean": "trainer.use_v1=True with trainer.v1.trainer_mode=separate_async",
        "rollout/filtered_groups": "algorithm.filter_groups.enable=True",
    },
    options=OPTIONS,
    aliases=ALIASES,
    convert=convert,
    ignored=(
        r"step|training/global_step|global_step|_step|_runtime|_timestamp",
        r"global_seqlen/.*|perf/mfu/.*|timing_per_token_ms/.*|critic/(returns|values)/.*",
    ),
)
