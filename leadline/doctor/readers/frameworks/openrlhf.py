"""OpenRLHF."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.parsing import NUMBER, dict_items, number_text

CUT = "share of responses as long as the limit"

KEYS: Mapping[str, str | Key] = {
    "policy_loss": "loss/policy",
    "act_loss": "loss/policy",
    "critic_loss": "loss/value",
    "actor_grad_norm": "optimizer/grad_norm",
    "grad_norm": "optimizer/grad_norm",
    "critic_grad_norm": "optimizer/value_grad_norm",
    "actor_lr": "optimizer/learning_rate",
    "act_lr": "optimizer/learning_rate",
    "critic_lr": "optimizer/value_learning_rate",
    "reward": "reward/mean",
    "score": "reward/mean",
    "return": Key("reward/shaped_mean", "the return, KL included"),
    "group_reward_std": Key("reward/group_std", "0 means that every group is dead"),
    "dynamic_filtering_pass_rate": "rollout/filter_pass_fraction",
    "ppo_clip_ratio": "policy/clip_fraction",
    "ppo_kl": Key("policy/kl_old_k1", "signed"),
    "kl": Key("kl/reference", "by kl_estimator, k1 unless set"),
    "logprobs_diff": Key("kl/k1", "actor less reference, in OpenRLHF's sign"),
    "vllm_kl": Key("importance/kl_k1", "signed; only logged with the correction on and policy_loss_type ppo"),
    "entropy_loss": Key("policy/entropy", "mean entropy; only logged with an entropy coefficient"),
    "ent_loss": Key("policy/entropy", "mean entropy; only logged with an entropy coefficient"),
    "response_length": "rollout/length_mean",
    "gen_len": "rollout/length_mean",
    "total_length": "rollout/total_length_mean",
    "tot_len": "rollout/total_length_mean",
    "response_clip_ratio": Key("rollout/truncated_fraction", CUT),
    "truncated": Key("rollout/truncated_fraction", CUT),
    "timing/step_total": "time/step_s",
    "timing/generation": "time/generate_s",
    "timing/ppo_train": "time/update_s",
    "timing/broadcast": "time/load_weights_s",
    "timing/make_experience": "time/experience_s",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"eval_(.+?)_pass@?(\d+|k)", "eval/score/{0}_pass_{1}"),
    (r"eval[/_](.+)", "eval/score/{0}"),
    (r"timing/([^/]+)", "time/{0}_s"),
)

_STEP = re.compile(r"Global step (\d+):\s*(\{.*)")
_BAR = re.compile(rf"(?<!\w)(\w{{1,60}})=({NUMBER})")


def console(lines: Iterator[str]) -> Iterator[Row]:
    """`Global step 7: {...}`; where there is none, the postfix of the progress bar."""
    bars: list[dict[str, Any]] = []
    found = False
    for line in lines:
        match = _STEP.search(line)
        if match:
            found = True
            yield {"step": match[1], **dict_items(match[2])}
        elif not found and "act_loss=" in line:
            bars.append({key: number_text(value) for key, value in _BAR.findall(line)})
    if not found:
        yield from bars


OPTIONS = {
    "model.name": "--pretrain",
    "model.lora_rank": "--lora_rank",
    "model.lora_alpha": "--lora_alpha",
    "rollout.group_size": "--n_samples_per_prompt",
    "rollout.max_staleness": "--train.async_queue_size",
    "sampling.temperature": "--temperature",
    "sampling.top_p": "--top_p",
    "sampling.max_tokens": "--generate_max_len",
    "data.max_prompt_tokens": "--prompt_max_len",
    "data.source": "--prompt_data",
    "objective.loss": "--policy_loss_type",
    "objective.advantage_scaling": "--advantage_estimator",
    "objective.beta": "--init_kl_coef",
    "objective.kl_estimator": "--kl_estimator",
    "objective.clip_low": "--eps_clip",
    "objective.clip_high": "--eps_clip_high",
    "objective.entropy_bonus": "--entropy_loss_coef",
    "objective.importance_action": "--algo.advantage.is_correction_enable",
    "objective.importance_level": "--algo.advantage.is_correction_type",
    "objective.importance_high": "--algo.advantage.is_correction_threshold",
    "optimizer.learning_rate": "--actor_learning_rate",
    "optimizer.max_grad_norm": "--max_norm",
    "optimizer.epochs_per_batch": "--max_epochs",
    "run.steps": "--num_episodes",
    "run.seed": "--seed",
}
ALIASES = {
    "entropy_coef": "objective.entropy_bonus",
    "actor.entropy_coef": "objective.entropy_bonus",
    "clip_eps_low_high.0": "objective.clip_low",
    "clip_eps_low_high.1": "objective.clip_high",
    "max_new_tokens": "sampling.max_tokens",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that OpenRLHF puts in other words."""
    settings: dict[str, Any] = {}
    named = {name.rsplit(".", 1)[-1].replace("-", "_"): value for name, value in options.items()}
    enabled = named.get("is_correction_enable", named.get("enable_vllm_is_correction"))
    if enabled is not None:
        kind = named.get("is_correction_type", "tis") if enabled not in (False, "False", "false") else "off"
        settings["objective.importance_action"] = {"off": "off", "tis": "truncate"}.get(str(kind), "mask")
        settings["objective.importance_level"] = "geometric" if kind == "seq-mask-tis" else "token"
    estimator = named.get("advantage_estimator")
    if estimator in ("group_norm", "dr_grpo", "rloo", "reinforce_baseline"):
        scaling = {"group_norm": "group_std", "dr_grpo": "none", "rloo": "leave_one_out"}
        settings["objective.advantage_scaling"] = scaling.get(estimator, estimator)
    return settings


CORRECTION = "--algo.advantage.is_correction_enable"

OPENRLHF = Framework(
    name="openrlhf",
    words=("openrlhf", "open-rlhf"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "train/global_step", "global_step", "_step", "Step"),
    prefixes=("train/",),
    marks=(r"Global step \d+:\s*\{", r"act_loss=[-\d.]+"),
    console=console,
    could_log={
        "importance/kl_k1": CORRECTION,
        "policy/entropy": "--actor.entropy_coef (0 measures it and changes nothing)",
        "rollout/filter_pass_fraction": "--algo.dynamic_filtering_enable",
        "kl/reference": "--init_kl_coef (> 0) or --use_kl_loss",
        "eval/reward_mean": "--eval_dataset with --eval_steps",
    },
    options=OPTIONS,
    aliases=ALIASES,
    convert=convert,
    ignored=(r"(train/)?global_step|step|_step|_runtime|_timestamp|values|generated_samples|kl_coef",),
)
