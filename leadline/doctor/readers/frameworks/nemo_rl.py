"""NeMo-RL."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.parsing import NUMBER

ESTIMATE = "estimated from the logprobs of the sampled tokens"

KEYS: Mapping[str, str | Key] = {
    "loss": "loss",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/learning_rate",
    "total_reward": Key("reward/mean", "before filtering"),
    "mean_total_reward": Key("reward/mean", "before filtering"),
    "reward": Key("reward/mean", "of the trained batch"),
    "filtered_reward": Key("reward/shaped_mean", "after dynamic sampling"),
    "advantages/mean": "advantage/mean",
    "advantages/max": "advantage/max",
    "advantages/min": "advantage/min",
    "baseline_reward/pct_0": Key("reward/all_failed_fraction", "exact for rewards of 0 and 1 only"),
    "baseline_reward/pct_1": Key("reward/all_solved_fraction", "exact for rewards of 0 and 1 only"),
    "baseline_reward/pct_mixed": "reward/mixed_fraction",
    "kl_penalty": Key("kl/k3", "before its coefficient; 0 when there is no reference"),
    "gen_kl_error": "importance/kl_k3",
    "policy_kl_error": "importance/kl_k3_reverse",
    "js_divergence_error": "importance/js_divergence",
    "token_mult_prob_error": "importance/mult_prob_error",
    "mean_seq_mult_prob_error": Key("importance/sequence_mult_prob_error_mean", placeholder=0.0),
    "max_seq_mult_prob_error": Key("importance/sequence_mult_prob_error_max", placeholder=0.0),
    "min_seq_mult_prob_error": Key("importance/sequence_mult_prob_error_min", placeholder=0.0),
    "sampling_importance_ratio": "importance/ratio_mean",
    "num_masked_seqs_by_logprob_error": "importance/masked_sequences",
    "is_oob_ratio": "importance/out_of_bounds_fraction",
    "probs_ratio": Key("policy/ratio_mean", placeholder=-1.0),
    "probs_ratio_min": Key("policy/ratio_min", placeholder=-1.0),
    "probs_ratio_max": Key("policy/ratio_max", placeholder=-1.0),
    "probs_ratio_clamped": Key("policy/ratio_clamped_mean", placeholder=-1.0),
    "approx_entropy": Key("policy/entropy", ESTIMATE),
    "mean_gen_tokens_per_sample": "rollout/length_mean",
    "max_gen_tokens_per_sample": "rollout/length_max",
    "mean_total_tokens_per_sample": "rollout/total_length_mean",
    "mean_prompt_length": "rollout/prompt_length_mean",
    "truncation_rate": "rollout/truncated_fraction",
    "natural_termination_rate": "rollout/stopped_fraction",
    "avg_turns_per_sample": "rollout/turns_mean",
    "avg_trajectory_age": "staleness/mean",
    "buffer_size": "rollout/queue_size",
    "global_valid_toks": "policy/tokens",
    "timing/train/total_step_time": "time/step_s",
    "timing/train/generation": "time/generate_s",
    "timing/train/policy_training": "time/update_s",
    "timing/train/weight_sync": "time/load_weights_s",
    "performance/tokens_per_sec_per_gpu": "throughput/tokens_per_device_s",
    "validation/accuracy": "eval/reward_mean",
    "validation/avg_length": "eval/length_mean",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"validation/(.+)", "eval/score/{0}"),
    (r"timing/train/(.+)", "time/{0}_s"),
)

_LABELS = {
    "Loss": "loss",
    "Generation KL Error": "gen_kl_error",
    "Avg Reward": "reward",
    "Avg Filtered Reward": "filtered_reward",
    "Avg Total Reward": "total_reward",
    "Mean Generation Length": "mean_gen_tokens_per_sample",
    "Buffer Size": "buffer_size",
    "Avg Trajectory Age": "avg_trajectory_age",
    "Mean Total Tokens per Sample": "mean_total_tokens_per_sample",
    "Total step time": "timing/train/total_step_time",
    "E2E (Tokens/sec/gpu)": "performance/tokens_per_sec_per_gpu",
    "Accuracy": "validation/accuracy",
    "Average response length": "validation/avg_length",
}
_CELL = re.compile(rf"^\s*[•\-*]\s*(.+?):\s*({NUMBER})\s*(s|steps|tokens|%)?(?:\s*\([\d.]+%\))?\s*$")
_STEP = re.compile(r"Step (\d+)/\d+")


def console(lines: Iterator[str]) -> Iterator[Row]:
    """A heading `Training Results:` and bullets below it; the step is named above or counted from 1."""
    row: dict[str, Any] = {}
    count, named, inside, timing = 0, None, "", False
    for line in lines:
        step = _STEP.search(line)
        if step:
            named = step[1]
        if "Training Results:" in line or "Validation Results:" in line:
            if "Training" in line:
                if row:
                    yield row
                count += 1
                row = {"step": named or count}
            inside, timing = line, False
        elif "Timing:" in line:
            timing = True
        cell = _CELL.match(line) if inside else None
        if cell:
            key = _LABELS.get(cell[1]) or (f"timing/train/{cell[1]}" if timing and cell[3] == "s" else None)
            if key and not (timing and "Validation" in inside):
                row.setdefault(key, cell[2])
    if row:
        yield row


OPTIONS = {
    "model.name": "policy.model_name",
    "model.dtype": "policy.precision",
    "rollout.group_size": "grpo.num_generations_per_prompt",
    "rollout.groups_per_step": "grpo.num_prompts_per_step",
    "rollout.max_staleness": "grpo.async_grpo.max_trajectory_age_steps",
    "sampling.temperature": "policy.generation.temperature",
    "sampling.top_p": "policy.generation.top_p",
    "sampling.top_k": "policy.generation.top_k",
    "sampling.max_tokens": "policy.generation.max_new_tokens",
    "sampling.stop": "policy.generation.stop_strings",
    "engine.kind": "policy.generation.backend",
    "objective.aggregation": "loss_fn.token_level_loss",
    "objective.advantage_scaling": "grpo.normalize_rewards",
    "objective.beta": "loss_fn.reference_policy_kl_penalty",
    "objective.clip_low": "loss_fn.ratio_clip_min",
    "objective.clip_high": "loss_fn.ratio_clip_max",
    "objective.clip_delta": "loss_fn.ratio_clip_c",
    "objective.importance_action": "loss_fn.use_importance_sampling_correction",
    "objective.importance_level": "loss_fn.truncated_importance_sampling_type",
    "objective.importance_high": "loss_fn.truncated_importance_sampling_ratio",
    "objective.mask_truncated": "grpo.overlong_filtering",
    "optimizer.learning_rate": "policy.optimizer.kwargs.lr",
    "optimizer.max_grad_norm": "policy.max_grad_norm",
    "run.steps": "grpo.max_num_steps",
    "run.seed": "grpo.seed",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that NeMo-RL puts in other words."""
    settings: dict[str, Any] = {}
    used = options.get("loss_fn.use_importance_sampling_correction")
    if used is not None:
        kind = str(options.get("loss_fn.truncated_importance_sampling_type") or "tis")
        settings["objective.importance_action"] = ("truncate" if kind == "tis" else "mask") if used is True else "off"
        settings["objective.importance_level"] = "geometric" if kind == "seq-mask-tis" else "token"
    if options.get("grpo.use_leave_one_out_baseline") is True:
        settings["raw.leave_one_out_normalised"] = options.get("grpo.normalize_rewards")
    return settings


NEMO_RL = Framework(
    name="nemo_rl",
    words=("nemo-rl", "nemo_rl", "nemo rl", "nemo"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "_step", "Step"),
    prefixes=("train/",),
    marks=(r"Training Results:", r"Generation KL Error:"),
    console=console,
    could_log={
        "policy/ratio_mean": "loss_fn.force_on_policy_ratio=false",
        "policy/ratio_min": "loss_fn.force_on_policy_ratio=false",
        "policy/ratio_max": "loss_fn.force_on_policy_ratio=false",
        "importance/log_ratio_abs_mean": "logger.log_dir (train_data_step*.jsonl)",
        "kl/k3": "loss_fn.reference_policy_kl_penalty (> 0)",
        "staleness/mean": "grpo.async_grpo.enabled=true",
        "eval/reward_mean": "grpo.val_period",
    },
    options=OPTIONS,
    convert=convert,
    ignored=(r"step|_step|_runtime|_timestamp|ray/.*|refit/.*|train/global_valid_seqs|validation/.*_curve",),
)
