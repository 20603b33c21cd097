"""ROLL."""

import re
from collections.abc import Iterator, Mapping

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.parsing import dict_items

OUTSIDE = "share of ratios outside the bounds, whether or not the gradient was removed"

KEYS: Mapping[str, str | Key] = {
    "actor/total_loss": "loss",
    "actor/pg_loss": "loss/policy",
    "critic/loss": "loss/value",
    "actor_train/grad_norm": "optimizer/grad_norm",
    "actor/grad_norm": "optimizer/grad_norm",
    "actor/lr": "optimizer/learning_rate",
    "critic/lr": "optimizer/value_learning_rate",
    "critic/score/mean": "reward/mean",
    "critic/score/max": "reward/max",
    "critic/score/min": "reward/min",
    "critic/rewards/mean": "reward/shaped_mean",
    "critic/advantages/mean": "advantage/mean",
    "critic/advantages/max": "advantage/max",
    "critic/advantages/min": "advantage/min",
    "actor/kl_loss": Key("kl/k3", "before its coefficient"),
    "critic/kl": "kl/reference",
    "critic/kl_coef": "kl/coefficient",
    "actor/approxkl": Key("policy/kl_old_k2", "half the mean squared log ratio"),
    "actor/policykl": Key("policy/kl_old_k1", "signed"),
    "actor/clipfrac": "policy/clip_fraction",
    "actor/ppo_ratio_clipfrac": Key("policy/clip_fraction", OUTSIDE),
    "actor/ppo_ratio_low_clipfrac": Key("policy/clip_low_fraction", OUTSIDE),
    "actor/ppo_ratio_high_clipfrac": Key("policy/clip_high_fraction", OUTSIDE),
    "actor/ratio_mean": "policy/ratio_mean",
    "actor/ratio_max": "policy/ratio_max",
    "actor/ratio_min": "policy/ratio_min",
    "critic/entropy/mean": "policy/entropy",
    "critic/entropy/max": "policy/entropy_max",
    "critic/entropy/min": "policy/entropy_min",
    "actor/train_infer_ratio_token_mean": "importance/ratio_mean",
    "actor/train_infer_ratio_sequence_mean": "importance/sequence_ratio_mean",
    "actor/train_infer_ratio_geometric_mean": "importance/geometric_ratio_mean",
    "actor/train_infer_diff_token_mean": "importance/prob_diff_mean",
    "actor/is_weight_clipfrac": "importance/truncated_fraction",
    "actor/train_infer_final_mask_mean": "importance/kept_fraction",
    "tokens/response_length/mean": "rollout/length_mean",
    "tokens/response_length/max": "rollout/length_max",
    "tokens/response_length/min": "rollout/length_min",
    "token/response_length/mean": "rollout/length_mean",
    "token/response_length/max": "rollout/length_max",
    "token/response_length/min": "rollout/length_min",
    "tokens/prompt_length/mean": "rollout/prompt_length_mean",
    "tokens/prompt_length/max": "rollout/prompt_length_max",
    "tokens/total_length/mean": "rollout/total_length_mean",
    "token/prompt_length/mean": "rollout/prompt_length_mean",
    "token/prompt_length/max": "rollout/prompt_length_max",
    "time/step_total": "time/step_s",
    "time/rollout": "time/generate_s",
    "system/tps": "throughput/tokens_per_s",
    "val/score/mean": "eval/reward_mean",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"val/(.+)", "eval/score/{0}"),
    (r"time/(.+)", "time/{0}_s"),
)

_LINE = re.compile(r'metrics_tag:\s*\{\s*"step"\s*:\s*(\d+)\s*,\s*"metrics"\s*:\s*(\{.*)')


def console(lines: Iterator[str]) -> Iterator[Row]:
    """`metrics_tag: {"step": 3, "metrics": {...}}`; reducer tags such as `@mean` are cut off the names."""
    for line in lines:
        match = _LINE.search(line)
        if match:
            yield {"step": match[1], **{key.split("@")[0]: value for key, value in dict_items(match[2]).items()}}


OPTIONS = {
    "model.name": "pretrain",
    "rollout.group_size": "num_return_sequences_in_group",
    "rollout.groups_per_step": "rollout_batch_size",
    "rollout.max_staleness": "async_generation_ratio",
    "sampling.temperature": "actor_infer.generating_args.temperature",
    "sampling.top_p": "actor_infer.generating_args.top_p",
    "sampling.top_k": "actor_infer.generating_args.top_k",
    "sampling.max_tokens": "response_length",
    "data.max_prompt_tokens": "prompt_length",
    "engine.kind": "actor_infer.strategy_args.strategy_name",
    "objective.loss": "pg_variant",
    "objective.aggregation": "loss_agg_mode",
    "objective.advantage_scaling": "adv_estimator",
    "objective.beta": "kl_loss_coef",
    "objective.clip_low": "pg_clip_low",
    "objective.clip_high": "pg_clip_high",
    "objective.entropy_bonus": "entropy_loss_coef",
    "objective.importance_action": "train_infer_correction.is_weight.enabled",
    "objective.importance_level": "train_infer_correction.is_weight.weight_type",
    "objective.importance_high": "train_infer_correction.is_weight.upper_bound",
    "optimizer.learning_rate": "actor_train.training_args.learning_rate",
    "optimizer.max_grad_norm": "actor_train.training_args.max_grad_norm",
    "optimizer.epochs_per_batch": "ppo_epochs",
    "run.steps": "max_steps",
    "run.seed": "seed",
}
ALIASES = {"pg_clip": "objective.clip_low", "generating_args.max_new_tokens": "sampling.max_tokens"}

RATIO = "train_infer_correction.is_weight.enabled=true"

ROLL = Framework(
    name="roll",
    words=("roll", "alibaba/roll"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "system/global_step", "global_step", "_step", "Step"),
    marks=(r"metrics_tag:\s*\{",),
    console=console,
    could_log={
        "importance/ratio_mean": RATIO,
        "importance/prob_diff_mean": RATIO,
        "importance/truncated_fraction": RATIO,
        "kl/k3": "use_kl_loss=true",
        "eval/reward_mean": "eval_steps with a validation set",
    },
    options=OPTIONS,
    aliases=ALIASES,
    ignored=(r"step|_step|_runtime|_timestamp|system/global_step|system/samples|critic/(values|returns)/.*",),
)
