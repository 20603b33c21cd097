"""slime, and its fork miles."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.parsing import dict_items

SHAPED = "after normalisation within the group: about 0 by construction"

KEYS: Mapping[str, str | Key] = {
    "train/loss": "loss",
    "train/pg_loss": "loss/policy",
    "train/critic-value_loss": "loss/value",
    "train/value_loss": "loss/value",
    "train/grad_norm": "optimizer/grad_norm",
    "train/lr-pg_0": "optimizer/learning_rate",
    "rollout/raw_reward": "reward/mean",
    "rollout/rewards": Key("reward/shaped_mean", SHAPED),
    "rollout/advantages": "advantage/mean",
    "train/kl_loss": Key("kl/reference", "by --kl-loss-type, k1 unless set"),
    "train/ppo_kl": Key("policy/kl_old_k1", "signed"),
    "train/pg_clipfrac": "policy/clip_fraction",
    "train/entropy_loss": Key("policy/entropy", "mean entropy, sign positive"),
    "train/train_rollout_logprob_abs_diff": "importance/log_ratio_abs_mean",
    "train/train_rollout_kl": Key("importance/kl_k3", "miles counts a NaN as 0"),
    "train/ess_ratio": "importance/ess",
    "train/ois": Key("policy/ratio_mean", "ratio of the policy loss, before the clip"),
    "train/tis": Key("importance/weight_mean", "after the bound"),
    "train/tis_clipfrac": "importance/truncated_fraction",
    "train/tis_abs": "importance/weight_deviation",
    "train/opsm_clipfrac": "policy/off_policy_masked_fraction",
    "train/mismatch_k3_kl": "importance/kl_k3",
    "train/mismatch_kl": Key("importance/kl_k1", "signed"),
    "train/mis_mean": "importance/ratio_mean",
    "rollout/log_probs": "policy/old_logprob_mean",
    "rollout/rollout_log_probs": Key("rollout/entropy", "minus the mean logprob", factor=-1),
    "rollout/ref_log_probs": "kl/ref_logprob_mean",
    "rollout/response_len/mean": "rollout/length_mean",
    "rollout/response_len/median": "rollout/length_median",
    "rollout/response_len/max": "rollout/length_max",
    "rollout/response_len/min": "rollout/length_min",
    "rollout/response_lengths": "rollout/length_mean",
    "rollout/total_lengths": "rollout/total_length_mean",
    "rollout/truncated_ratio": "rollout/truncated_fraction",
    "rollout/truncated": "rollout/truncated_fraction",
    "rollout/repetition_frac": "rollout/repetition_fraction",
    "rollout/fully_async/avg_staleness": "staleness/mean",
    "rollout/fully_async/max_staleness": "staleness/max",
    "rollout/fully_async/stale_groups_filtered": "rollout/dropped_samples",
    "rollout/fully_async/queue_size": "rollout/queue_size",
    "perf/step_time": "time/step_s",
    "perf/rollout_time": "time/generate_s",
    "perf/train_time": "time/update_s",
    "perf/actor_train_time": "time/actor_update_s",
    "perf/update_weights_time": "time/load_weights_s",
    "perf/log_probs_time": "time/log_probs_s",
    "perf/ref_log_probs_time": "time/ref_log_probs_s",
    "perf/train_wait_time": "time/wait_s",
    "perf/tokens_per_gpu_per_sec": "throughput/tokens_per_device_s",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    # the first reward value that any group shares; the sum over all of them is made where rows are put together
    (r"rollout/zero_std/count_(.+)", Key("reward/zero_std_groups", "groups that share one reward value, summed")),
    (r"rollout/dynamic_filter/drop_zero_std_(.+)", Key("rollout/filtered_groups", "groups dropped, summed")),
    (r"train/mismatch_.*k3.*", "importance/kl_k3"),
    (r"eval/(.+)-pass@(\d+)", "eval/score/{0}_pass_{1}"),
    (r"eval/(.+)", "eval/score/{0}"),
)

_LINE = re.compile(r"(?:^|[\s\-\]])((?:\w{1,30}-)?step|rollout|perf|eval)\s+(\d+):\s*(\{.*)")


def console(lines: Iterator[str]) -> Iterator[Row]:
    """`step 12: {...}` counts optimizer steps; `rollout 3:`, `perf 3:` and `eval 3:` count rollouts."""
    for line in lines:
        match = _LINE.search(line)
        if not match:
            continue
        items = dict_items(match[3])
        if not items:
            continue
        if match[1] == "step":
            yield {"train/step": match[2], **items}
        elif match[1].endswith("-step"):
            role = match[1].removesuffix("step")
            renamed = {key.replace("train/", f"train/{role}", 1): value for key, value in items.items()}
            yield {"train/step": match[2], **renamed}
        else:
            yield {"rollout/step": match[2], **items}


OPTIONS = {
    "model.name": "--hf-checkpoint",
    "rollout.group_size": "--n-samples-per-prompt",
    "rollout.groups_per_step": "--rollout-batch-size",
    "rollout.max_staleness": "--max-weight-staleness",
    "sampling.temperature": "--rollout-temperature",
    "sampling.top_p": "--rollout-top-p",
    "sampling.top_k": "--rollout-top-k",
    "sampling.max_tokens": "--rollout-max-response-len",
    "sampling.stop": "--rollout-stop",
    "data.max_prompt_tokens": "--rollout-max-prompt-len",
    "data.source": "--prompt-data",
    "objective.loss": "--advantage-estimator",
    "objective.aggregation": "--calculate-per-token-loss",
    "objective.beta": "--kl-loss-coef",
    "objective.kl_estimator": "--kl-loss-type",
    "objective.clip_low": "--eps-clip",
    "objective.clip_high": "--eps-clip-high",
    "objective.entropy_bonus": "--entropy-coef",
    "objective.importance_action": "--use-tis",
    "objective.importance_high": "--tis-clip",
    "objective.importance_low": "--tis-clip-low",
    "optimizer.learning_rate": "--lr",
    "optimizer.max_grad_norm": "--clip-grad",
    "optimizer.weight_decay": "--weight-decay",
    "run.steps": "--num-rollout",
    "run.seed": "--seed",
}
ALIASES = {"kl_coef": "objective.beta", "max_response_len": "sampling.max_tokens"}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that slime puts in other words."""
    settings: dict[str, Any] = {}
    named = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
    if "use_tis" in named:
        settings["objective.importance_action"] = "truncate" if named["use_tis"] in (True, "True", "true") else "off"
    if named.get("kl_loss_type") == "low_var_kl":
        settings["objective.kl_estimator"] = "k3"
    return settings


MISMATCH = "--get-mismatch-metrics"

SLIME = Framework(
    name="slime",
    words=("slime", "thudm"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("train/step", "rollout/step", "eval/step", "step", "_step", "Step"),
    marks=(r"(?:\w{1,30}-)?step \d+: \{'train/", r"(?:rollout|perf|eval) \d+: \{'(?:rollout|perf|eval)/"),
    console=console,
    could_log={
        "importance/kl_k3": MISMATCH,
        "importance/kl_k1": MISMATCH,
        "importance/log_ratio_abs_mean": "--get-mismatch-metrics or --use-tis",
        "importance/weight_mean": "--use-tis",
        "importance/truncated_fraction": "--use-tis",
        "kl/reference": "--use-kl-loss",
        "eval/reward_mean": "--eval-interval",
    },
    options=OPTIONS,
    aliases=ALIASES,
    convert=convert,
    ignored=(
        r"(train|rollout|eval)/step|step|_step|_runtime|_timestamp|ts|step_key",
        r"train/lr-pg_\d+|rollout/loss_masks",
    ),
)

MILES = replace(
    SLIME,
    name="miles",
    words=("miles", "radixark"),
    marks=(r"train/train_rollout_kl", r"train/ess_ratio", r"rollout/fully_async/avg_staleness"),
    could_log={**SLIME.could_log, "staleness/mean": "train_async.py --fully-async"},
)
