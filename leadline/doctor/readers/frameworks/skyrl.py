"""SkyRL."""

from collections.abc import Iterator, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.parsing import blocks, dict_items

MASKED = "taken over masked zeros too, so it is 0 whatever the ratios are"

KEYS: Mapping[str, str | Key] = {
    "policy/final_loss": "loss",
    "policy/policy_loss": "loss/policy",
    "critic/critic_loss": "loss/value",
    "policy/grad_norm": "optimizer/grad_norm",
    "policy/raw_grad_norm": "optimizer/grad_norm",
    "policy/policy_lr": "optimizer/learning_rate",
    "reward/avg_raw_reward": "reward/mean",
    "loss/avg_final_rewards": "reward/shaped_mean",
    "reward/num_zero_variance_filtered": Key("rollout/filtered_groups", "only with the filter on"),
    "loss/avg_raw_advantages": "advantage/mean",
    "loss/avg_raw_advantages_abs": "advantage/abs_mean",
    "policy/policy_kl": Key("kl/k3", "by kl_estimator_type, k3 unless set"),
    "loss/avg_kl": Key("kl/reference", "the KL inside the reward"),
    "loss/avg_kl_max": "kl/max",
    "policy/policy_entropy": "policy/entropy",
    "policy/rollout_train_logprobs_abs_diff_mean": "importance/log_ratio_abs_mean",
    "policy/rollout_train_logprobs_abs_diff_max": "importance/log_ratio_abs_max",
    "policy/rollout_train_logprobs_abs_diff_min": "importance/log_ratio_abs_min",
    "policy/rollout_train_logprobs_abs_diff_std": "importance/log_ratio_abs_std",
    "policy/loss_metrics/is_ratio_mean": "importance/ratio_mean",
    "policy/loss_metrics/is_ratio_max": "importance/ratio_max",
    "policy/loss_metrics/is_ratio_min": Key("importance/ratio_min", MASKED, placeholder=0.0),
    "policy/loss_metrics/is_ratio_std": Key("importance/ratio_std", "taken over masked zeros too"),
    "policy/loss_metrics/clip_ratio": "policy/clip_fraction",
    "policy/loss_metrics/tis_token_clip_high_ratio": "importance/truncated_fraction",
    "policy/loss_metrics/geo_sequence_mask_masked_ratio": "importance/sequence_masked_fraction",
    "policy/loss_metrics/product_sequence_mask_masked_ratio": "importance/sequence_masked_fraction",
    "policy/loss_metrics/outlier_seq_masked_ratio": "importance/veto_fraction",
    "policy/loss_metrics/token_mask_ratio": "importance/masked_fraction",
    "generate/avg_num_tokens": "rollout/length_mean",
    "generate/max_num_tokens": "rollout/length_max",
    "generate/min_num_tokens": "rollout/length_min",
    "generate/std_num_tokens": "rollout/length_std",
    "async/staleness_mean": "staleness/mean",
    "async/staleness_max": "staleness/max",
    "async/staleness_min": "staleness/min",
    "async/num_groups_dropped": "rollout/dropped_samples",
    "trainer/epoch": "run/epoch",
    "trainer/tokens_per_second_per_gpu": "throughput/tokens_per_device_s",
    "timing/step": "time/step_s",
    "timing/generate": "time/generate_s",
    "timing/policy_train": "time/update_s",
    "timing/sync_weights": "time/load_weights_s",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"reward/avg_pass_at_(\d+)", "reward/pass_at_{0}"),
    (r"timing/([^/]+)", "time/{0}_s"),
    (r"eval/(.+)", "eval/score/{0}"),
)


def console(lines: Iterator[str]) -> Iterator[Row]:
    """`Step 5:` and then a printed dict over several lines, its numbers as quoted text of four decimals."""
    held: list[str] = []

    def remembered() -> Iterator[str]:
        for line in lines:
            held[:] = [line]
            yield line

    for block in blocks(_joined(remembered()), r"Step \d+:\s*\{"):
        items = dict_items(block)
        if items:
            yield {"step": items.pop("trainer/global_step", None) or items.pop("_step", None), **items}


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """`Step 5:` at the end of a line and the brace on the next become one line."""
    waiting = ""
    for line in lines:
        stripped = line.rstrip()
        if waiting:
            line, waiting = waiting + " " + line.lstrip(), ""
        elif stripped.endswith(":") and "Step " in stripped:
            waiting = stripped[stripped.rindex("Step ") :]
            continue
        yield line


OPTIONS = {
    "model.name": "trainer.policy.model.path",
    "model.lora_rank": "trainer.policy.model.lora.rank",
    "rollout.group_size": "generator.n_samples_per_prompt",
    "rollout.max_staleness": "trainer.fully_async.max_staleness_steps",
    "sampling.temperature": "generator.sampling_params.temperature",
    "sampling.top_p": "generator.sampling_params.top_p",
    "sampling.top_k": "generator.sampling_params.top_k",
    "sampling.min_p": "generator.sampling_params.min_p",
    "sampling.max_tokens": "generator.sampling_params.max_generate_length",
    "sampling.stop": "generator.sampling_params.stop",
    "engine.kind": "generator.backend",
    "data.max_prompt_tokens": "trainer.max_prompt_length",
    "objective.loss": "trainer.algorithm.policy_loss_type",
    "objective.aggregation": "trainer.algorithm.loss_reduction",
    "objective.advantage_scaling": "trainer.algorithm.grpo_norm_by_std",
    "objective.beta": "trainer.algorithm.kl_loss_coef",
    "objective.kl_estimator": "trainer.algorithm.kl_estimator_type",
    "objective.clip_low": "trainer.algorithm.eps_clip_low",
    "objective.clip_high": "trainer.algorithm.eps_clip_high",
    "objective.entropy_bonus": "trainer.algorithm.entropy_loss_coef",
    "objective.importance_level": "trainer.algorithm.off_policy_correction.tis_ratio_type",
    "objective.importance_action": "trainer.algorithm.off_policy_correction.tis_ratio_type",
    "objective.importance_high": "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
    "optimizer.learning_rate": "trainer.policy.optimizer_config.lr",
    "optimizer.max_grad_norm": "trainer.policy.optimizer_config.max_grad_norm",
    "optimizer.epochs_per_batch": "trainer.update_epochs_per_batch",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that SkyRL puts in other words."""
    settings: dict[str, Any] = {}
    kind = options.get("trainer.algorithm.off_policy_correction.tis_ratio_type")
    if "trainer.algorithm.off_policy_correction.tis_ratio_type" in options:
        settings["objective.importance_action"] = "off" if kind in (None, "null") else "truncate"
    if options.get("trainer.algorithm.use_kl_loss") is False:
        settings["objective.beta"] = 0.0
    normalised = options.get("trainer.algorithm.grpo_norm_by_std")
    if isinstance(normalised, bool):
        settings["objective.advantage_scaling"] = "group_std" if normalised else "none"
    return settings


SKYRL = Framework(
    name="skyrl",
    words=("skyrl", "sky-rl", "novasky"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "trainer/global_step", "global_step", "_step", "Step"),
    marks=(r"'policy/final_loss'", r"'trainer/global_step'", r"'reward/avg_raw_reward'"),
    console=console,
    could_log={
        "importance/ratio_mean": "trainer.algorithm.off_policy_correction.tis_ratio_type",
        "importance/sequence_masked_fraction": "trainer.algorithm.off_policy_correction.sequence_mask_metric",
        "importance/log_ratio_abs_mean": "generator.sampling_params.logprobs",
        "kl/k3": "trainer.algorithm.use_kl_loss=true",
        "rollout/filtered_groups": "trainer.algorithm.zero_variance_filter=true",
        "staleness/mean": "the fully asynchronous trainer (trainer.fully_async)",
    },
    options=OPTIONS,
    convert=convert,
    ignored=(r"step|_step|_runtime|_timestamp|(trainer/)?global_step",),
)
