"""open-instruct (grpo_fast)."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.parsing import NUMBER

SENTINEL = "a NaN logprob is replaced by +1.0 before this is computed"
WEIGHTED = "weighted by the sampler's probability in most versions; " + SENTINEL

KEYS: Mapping[str, str | Key] = {
    "loss/total_avg": "loss",
    "loss/policy_avg": "loss/policy",
    "loss/kl_avg": Key("loss/kl", "beta included"),
    "optim/grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/learning_rate",
    "scores": "reward/mean",
    "objective/scores": "reward/mean",
    "objective/kl_avg": Key("kl/k1", "signed"),
    "objective/kl2_avg": "kl/k2",
    "objective/kl3_avg": "kl/k3",
    "objective/kl4_avg": Key("kl/reference", "log ratio weighted by the ratio"),
    "val/advantages_mean": "advantage/mean",
    "val/advantages_max": "advantage/max",
    "val/advantages_min": "advantage/min",
    "policy/clipfrac_avg": "policy/clip_fraction",
    "policy/entropy_avg": "policy/entropy",
    "val/ratio": "policy/ratio_mean",
    "val/ratio_var": "policy/ratio_variance",
    "val/rho_weight": Key("importance/weight_mean", "after the clamp"),
    "val/rho_clipfrac": "importance/truncated_fraction",
    "val/rho_drop_frac": "importance/masked_fraction",
    "debug/vllm_vs_local_logprob_diff_mean": Key("importance/log_ratio_abs_mean", SENTINEL),
    "debug/vllm_vs_local_logprob_diff_max": Key("importance/log_ratio_abs_max", SENTINEL),
    "debug/vllm_vs_local_logprob_diff_std": Key("importance/log_ratio_abs_std", SENTINEL),
    "debug/vllm_local_reverse_kl": Key("importance/kl_weighted", WEIGHTED),
    "val/sequence_lengths": "rollout/length_mean",
    "val/sequence_lengths_max": "rollout/length_max",
    "val/sequence_lengths_min": "rollout/length_min",
    "val/stop_rate": Key(
        "rollout/truncated_fraction", "one less the share that stopped by itself", factor=-1, offset=1
    ),
    "batch/filtered_prompts": "rollout/filtered_groups",
    "stale_results_dropped": "rollout/dropped_samples",
    "num_steps_off_policy": "staleness/mean",
    "val/actor_tokens_per_second": "throughput/sampled_tokens_per_s",
    "learner_tokens_per_second_step": "throughput/trained_tokens_per_s",
    "time/total": "time/step_s",
    "time/training": "time/update_s",
    "time/weight_sync": "time/load_weights_s",
    "val/num_total_tokens": "run/tokens",
    "epoch": "run/epoch",
    "eval/scores": "eval/reward_mean",
    "eval/sequence_lengths": "eval/length_mean",
    "eval/stop_rate": Key("eval/truncated_fraction", "one less the share that stopped", factor=-1, offset=1),
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"objective/(.+)_(?:reward|correct_rate)", "reward/{0}/mean"),
    (r"eval/(.+)", "eval/score/{0}"),
    (r"time/([^/]+)", "time/{0}_s"),
)


def refine(keys: frozenset[str], values: Callable[[str], Any]) -> Mapping[str, str | Key]:
    """Newer versions count the estimators from 0: kl0 is k1, kl2 is k3."""
    if "objective/kl0_avg" not in keys:
        return {}
    return {
        "objective/kl0_avg": Key("kl/k1", "signed"),
        "objective/kl1_avg": "kl/k2",
        "objective/kl2_avg": "kl/k3",
        "objective/kl3_avg": Key("kl/reference", "log ratio weighted by the ratio"),
    }


_ROW = re.compile(r"[│┃|]\s*([\w\-]+)?\s+(.*?)\s*[│┃|]\s*$")
_CELL = re.compile(rf"(?<![\w/@.\-])([\w/@.\-]{{1,100}}):\s*({NUMBER})")
_TITLE = re.compile(r"[╭┏┌][─━ ]*Metrics")


def console(lines: Iterator[str]) -> Iterator[Row]:
    """A panel `Metrics`: a category, then `name: value | name: value`, wrapped to the width of the terminal."""
    row: dict[str, Any] | None = None
    category = ""
    for line in lines:
        if _TITLE.search(line):
            row, category = {}, ""
            continue
        if row is None:
            continue
        if re.match(r"\s*[╰┗└]", line):
            if row:
                yield row
            row = None
            continue
        match = _ROW.search(line)
        if match:
            # a wrapped line has no category of its own
            category = match[1] or category
            for name, value in _CELL.findall(match[2]):
                row[name if category == "other" else f"{category}/{name}"] = value
    if row:
        yield row


OPTIONS = {
    "model.name": "--model_name_or_path",
    "rollout.group_size": "--num_samples_per_prompt_rollout",
    "rollout.groups_per_step": "--num_unique_prompts_rollout",
    "rollout.max_staleness": "--async_steps",
    "sampling.temperature": "--temperature",
    "sampling.top_p": "--vllm_top_p",
    "sampling.max_tokens": "--response_length",
    "sampling.stop": "--stop_strings",
    "objective.loss": "--loss_fn",
    "objective.advantage_scaling": "--advantage_normalization_type",
    "objective.beta": "--beta",
    "objective.clip_low": "--clip_lower",
    "objective.clip_high": "--clip_higher",
    "objective.importance_action": "--use_rho_correction",
    "objective.importance_high": "--rho_clamp_upper",
    "objective.mask_truncated": "--mask_truncated_completions",
    "optimizer.learning_rate": "--learning_rate",
    "optimizer.max_grad_norm": "--max_grad_norm",
    "optimizer.epochs_per_batch": "--num_epochs",
    "run.steps": "--num_training_steps",
    "run.seed": "--seed",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that open-instruct puts in other words."""
    settings: dict[str, Any] = {}
    used = options.get("use_rho_correction", options.get("--use_rho_correction"))
    if used is not None:
        settings["objective.importance_action"] = "truncate" if used in (True, "True", "true") else "off"
    return settings


DEBUG = "logged from the first step when vLLM returns logprobs"

OPEN_INSTRUCT = Framework(
    name="open_instruct",
    words=("open-instruct", "open_instruct", "allenai"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("training_step", "step", "global_step", "_step", "Step"),
    marks=(r"debug/vllm_vs_local_logprob_diff", r"[╭┏][─━ ]*Metrics[─━ ]*[╮┓]", r"vllm_vs_local_logprob_diff_mean"),
    console=console,
    refine=refine,
    could_log={
        "kl/k3": "--load_ref_policy with --beta",
        "policy/entropy": "--record_entropy",
        "importance/weight_mean": "--use_rho_correction",
        "importance/log_ratio_abs_mean": DEBUG,
        "eval/reward_mean": "--local_eval_every",
    },
    options=OPTIONS,
    convert=convert,
    ignored=(r"step|training_step|episode|_step|_runtime|_timestamp|model_step_\w+",),
)
