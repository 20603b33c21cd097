"""TRL, and what is built on it: unsloth, ms-swift, open-r1."""

from collections.abc import Callable, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key

GIB = 2.0**30
NO_EOS = (
    "TRL counts a completion as cut unless its last token is an EOS or pad token that it knows: one that ended at a "
    "stop string counts as cut"
)
AS_APPLIED = "logged after the bound and the mask; a completion that is masked whole may count as 1"
WINDOW = "TRL averages the extrema of the steps in a logging window"

KEYS: Mapping[str, str | Key] = {
    "loss": Key("loss", "the HF trainer may put the running mean in place of a NaN (logging_nan_inf_filter)"),
    "policy_loss": "loss/policy",
    "aux_loss": "loss/auxiliary",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "reward": "reward/mean",
    "reward_std": Key("reward/std", "TRL before 1.x logged the mean std within groups under this name"),
    "frac_reward_zero_std": Key(
        "reward/zero_std_fraction",
        '0 also when every reward of a group is None or one is infinite; over the batch with scale_rewards="batch"',
    ),
    "completions/mean_length": "rollout/length_mean",
    "completions/min_length": Key("rollout/length_min", WINDOW),
    "completions/max_length": Key("rollout/length_max", WINDOW),
    "completion_length": "rollout/length_mean",
    "completions/clipped_ratio": Key("rollout/truncated_fraction", NO_EOS),
    "response_clip_ratio": Key("rollout/truncated_fraction", NO_EOS),
    "completions/mean_terminated_length": "rollout/terminated_length_mean",
    "completions/min_terminated_length": "rollout/terminated_length_min",
    "completions/max_terminated_length": "rollout/terminated_length_max",
    "kl": Key("kl/k3", "times the importance ratio with use_bias_correction_kl, the default"),
    "entropy": "policy/entropy",
    "entropy/mean": "policy/entropy",
    "entropy/max": "policy/entropy_max",
    "entropy/min": "policy/entropy_min",
    "entropy_coef": "policy/entropy_coefficient",
    "clip_ratio/region_mean": "policy/clip_fraction",
    "clip_ratio": "policy/clip_fraction",
    "clip_ratio/low_mean": "policy/clip_low_fraction",
    "clip_ratio/low_min": "policy/clip_low_fraction_min",
    "clip_ratio/high_mean": "policy/clip_high_fraction",
    "clip_ratio/high_max": Key("policy/clip_high_fraction_max", WINDOW),
    "cispo_clip_ratio": Key("policy/clip_high_fraction", "CISPO bounds the ratio and keeps the gradient"),
    "ratio": "importance/policy_ratio_mean",
    "sampling/sampling_logp_difference/mean": "importance/log_ratio_abs_mean",
    "sampling/sampling_logp_difference/max": Key("importance/log_ratio_abs_max", WINDOW),
    "sampling/importance_sampling_ratio/mean": Key("importance/weight_mean", AS_APPLIED),
    "sampling/importance_sampling_ratio/min": Key("importance/weight_min", AS_APPLIED),
    "sampling/importance_sampling_ratio/max": Key("importance/weight_max", AS_APPLIED),
    "IS_ratio_mean": Key("importance/weight_mean", AS_APPLIED),
    "tools/call_frequency": "rollout/tool_calls_mean",
    "tools/failure_frequency": "rollout/tool_failure_fraction",
    "sample/staleness_mean": "staleness/mean",
    "sample/staleness_max": "staleness/max",
    "sample/dropped_stale_total": "rollout/dropped_samples",
    "sample/rollout_queue_size": "rollout/queue_size",
    "rollout/turns_mean": "rollout/turns_mean",
    "rollout/turns_max": "rollout/turns_max",
    "rollout/generated_tok_s": "throughput/sampled_tokens_per_s",
    "perf/trained_tok_s_wall_clock": "throughput/trained_tokens_per_s",
    "perf/mfu_wall_clock": "throughput/model_flops_fraction",
    "perf/step_s": "time/step_s",
    "perf/weight_sync_s": "time/load_weights_s",
    "perf/rollout_wait_s": "time/wait_s",
    "perf/optimizer_s": "time/optimizer_s",
    "perf/fwd_bwd_s": "time/update_s",
    "step_time": "time/step_s",
    "train_speed(s/it)": "time/step_s",
    "memory(GiB)": Key("memory/reserved_bytes", factor=GIB),
    "num_tokens": "run/tokens",
    "epoch": "run/epoch",
    "eval_loss": "eval/loss",
    "eval_reward": "eval/reward_mean",
    "eval_reward_std": "eval/reward_std",
    "eval_completions/mean_length": "eval/length_mean",
    "eval_completions/clipped_ratio": Key("eval/truncated_fraction", NO_EOS),
    # the older PPO and RLOO trainers
    "objective/kl": "kl/sequence_sum",
    "objective/scores": "reward/mean",
    "objective/rlhf_reward": "reward/shaped_mean",
    "policy/approxkl_avg": "policy/kl_old_k2",
    "policy/clipfrac_avg": "policy/clip_fraction",
    "policy/entropy_avg": "policy/entropy",
    "loss/policy_avg": "loss/policy",
    "loss/value_avg": "loss/value",
    "val/ratio": "policy/ratio_mean",
    "val/ratio_var": "policy/ratio_variance",
    "ppo/mean_scores": "reward/mean",
    "ppo/loss/total": "loss",
    "ppo/loss/policy": "loss/policy",
    "ppo/loss/value": "loss/value",
    "ppo/policy/approxkl": "policy/kl_old_k2",
    "ppo/policy/clipfrac": "policy/clip_fraction",
    "ppo/policy/entropy": "policy/entropy",
    "env/reward_mean": "reward/mean",
    "env/reward_std": "reward/std",
    "lr": "optimizer/learning_rate",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"rewards/(.+)/mean", "reward/{0}/mean"),
    (r"rewards/(.+)/std", "reward/{0}/std"),
    (r"rewards/([^/]+)", "reward/{0}/mean"),
    (r"eval_rewards/(.+)/mean", "eval/reward/{0}/mean"),
    (r"eval_rewards/([^/]+)", "eval/reward/{0}/mean"),
    (r"tools/([^/]+)/latency_s", "time/tool_{0}_s"),
    (r"profiling/Time taken: [^.]+\.(.+)", "time/{0}_s"),
)

GROUP_STD = "mean std within groups, as this version or trainer logs it"


def refine(keys: frozenset[str], values: Callable[[str], Any]) -> Mapping[str, str | Key]:
    """TRL changed the meaning of two names between versions and trainers; what else is logged tells which one it is."""
    different: dict[str, str | Key] = {}
    if "sample/staleness_mean" in keys:
        different["kl"] = Key("importance/kl_k3", "of the current policy against the sampler; there is no old policy")
        different["reward_std"] = Key("reward/group_std", "population std, as the asynchronous trainer computes it")
    elif "frac_reward_zero_std" not in keys and "reward_std" in keys:
        different["reward_std"] = Key("reward/group_std", GROUP_STD)
    return different


OPTIONS = {
    "model.name": "model_name_or_path",
    "model.dtype": "dtype",
    "model.lora_rank": "lora_r",
    "model.lora_alpha": "lora_alpha",
    "model.gradient_checkpointing": "gradient_checkpointing",
    "rollout.group_size": "num_generations",
    "rollout.max_staleness": "max_staleness",
    "sampling.temperature": "temperature",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.min_p": "min_p",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.max_tokens": "max_completion_length",
    "sampling.stop": "generation_kwargs",
    "objective.loss": "loss_type",
    "objective.advantage_scaling": "scale_rewards",
    "objective.beta": "beta",
    "objective.clip_low": "epsilon",
    "objective.clip_high": "epsilon_high",
    "objective.clip_delta": "delta",
    "objective.importance_action": "vllm_importance_sampling_mode",
    "objective.importance_level": "vllm_importance_sampling_mode",
    "objective.importance_high": "vllm_importance_sampling_clip_max",
    "objective.importance_low": "vllm_importance_sampling_clip_min",
    "objective.mask_truncated": "mask_truncated_completions",
    "objective.entropy_bonus": "entropy_coef",
    "objective.entropy_quantile": "top_entropy_quantile",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.warmup_steps": "warmup_steps",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.max_grad_norm": "max_grad_norm",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.epochs_per_batch": "num_iterations",
    "optimizer.minibatches": "steps_per_generation",
    "engine.kind": "use_vllm",
    "run.steps": "max_steps",
    "run.seed": "seed",
    "data.max_prompt_tokens": "max_prompt_length",
}

ALIASES = {
    "vllm_importance_sampling_cap": "objective.importance_high",
    "torch_dtype": "model.dtype",
    "model_init_kwargs.torch_dtype": "model.dtype",
    "model_init_kwargs.dtype": "model.dtype",
    "model": "model.name",
    "lora_rank": "model.lora_rank",
    "r": "model.lora_rank",
    "lr": "optimizer.learning_rate",
    "group_size": "rollout.group_size",
    "max_new_tokens": "sampling.max_tokens",
    "generation_kwargs.temperature": "sampling.temperature",
    "generation_kwargs.top_p": "sampling.top_p",
    "generation_kwargs.top_k": "sampling.top_k",
    "generation_kwargs.min_p": "sampling.min_p",
    "generation_kwargs.repetition_penalty": "sampling.repetition_penalty",
    "generation_kwargs.max_tokens": "sampling.max_tokens",
    "generation_kwargs.stop": "sampling.stop",
    "generation_kwargs.stop_token_ids": "sampling.stop_token_ids",
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "reward_funcs": "rewards",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that TRL puts in other words."""
    settings: dict[str, Any] = {}
    mode = options.get("vllm_importance_sampling_mode")
    if isinstance(mode, str) and mode.count("_") == 1 and "|" not in mode:
        settings["objective.importance_level"], settings["objective.importance_action"] = mode.split("_")
    if options.get("vllm_importance_sampling_correction") is False:
        settings["objective.importance_action"] = "off"
    if isinstance(options.get("use_vllm"), bool):
        settings["engine.kind"] = "vllm" if options["use_vllm"] else "hf"
    elif "vllm_mode" in options:
        settings["engine.kind"] = "vllm"
    scale = options.get("scale_rewards")
    if scale is not None:
        named = {"group": "group_std", "true": "group_std", "batch": "batch_std", "none": "none", "false": "none"}
        settings["objective.advantage_scaling"] = named.get(str(scale).lower(), str(scale))
    for word in ("fp16", "bf16"):
        if options.get(word) is True and "dtype" not in options and "torch_dtype" not in options:
            settings["model.dtype"] = {"fp16": "float16", "bf16": "bfloat16"}[word]
    return settings


CORRECTION = "use_vllm=True with vllm_importance_sampling_correction=True"

TRL = Framework(
    name="trl",
    words=("trl", "unsloth", "ms-swift", "swift", "open-r1", "open_r1", "huggingface"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "train/global_step", "global_step", "global_step/max_steps", "_step", "Step"),
    prefixes=("train/",),
    marks=(
        r"\{'loss': .*'(learning_rate|reward|grad_norm)':",
        r"'frac_reward_zero_std'",
        r"'completions?/mean_length'",
    ),
    refine=refine,
    could_log={
        "kl/k3": "beta (> 0)",
        "importance/log_ratio_abs_mean": CORRECTION,
        "importance/log_ratio_abs_max": CORRECTION,
        "importance/weight_mean": CORRECTION,
        "importance/weight_min": CORRECTION,
        "importance/weight_max": CORRECTION,
        "reward/zero_std_fraction": "TRL 0.18 or later",
        "rollout/truncated_fraction": "TRL 0.17 or later",
        "policy/entropy": "TRL 0.20 or later",
        "eval/reward_mean": "eval_strategy with an eval_dataset",
        "run/tokens": "TRL 0.17 or later",
    },
    options=OPTIONS,
    aliases=ALIASES,
    convert=convert,
    ignored=(
        r"(train_runtime|train_samples_per_second|train_steps_per_second|total_flos|train_loss|eval_runtime)",
        r"eval_(samples|steps)_per_second",
        r"global_step/max_steps|percentage|elapsed_time|remaining_time|train_speed\(iter/s\)|episode|eps",
        r"_(timestamp|runtime|wandb.*)|step|global_step|train/global_step",
    ),
)
