"""AReaL."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row

WIDTH = "compared with the padded width of the batch: at least one of N by construction"
WITH_PROMPT = "prompt included"
TERM = "-kl_ctl x (log pi - log pi_ref); without a reference the latter is 0, a bonus for unlikely tokens"

KEYS: Mapping[str, str | Key] = {
    "update/actor_loss/avg": Key("loss", "importance weight included"),
    "actor_loss/avg": Key("loss", "importance weight included"),
    "critic_loss/avg": "loss/value",
    "update/grad_norm": "optimizer/grad_norm",
    "grad_norm": "optimizer/grad_norm",
    "update/lr": "optimizer/learning_rate",
    "lr": "optimizer/learning_rate",
    "update/update_successful": "optimizer/update_successful",
    "update_successful": "optimizer/update_successful",
    "task_reward/avg": "reward/mean",
    "task_reward/max": "reward/max",
    "task_reward/min": "reward/min",
    "rollout/reward": "reward/mean",
    "final_reward/avg": "reward/shaped_mean",
    "advantages/avg": "advantage/mean",
    "advantages/max": "advantage/max",
    "advantages/min": "advantage/min",
    "kl_rewards/avg": Key("kl/reward_term", TERM),
    "update/approx_kl/avg": Key("policy/kl_old_k1", "signed"),
    "update/behave_approx_kl/avg": Key("importance/kl_k1", "signed"),
    "behave_approx_kl/avg": Key("importance/kl_k1", "signed"),
    "update/behave_imp_weight/avg": "importance/ratio_mean",
    "update/behave_imp_weight/min": "importance/ratio_min",
    "update/behave_imp_weight/max": "importance/ratio_max",
    "behave_imp_weight/avg": "importance/ratio_mean",
    "behave_imp_weight/min": "importance/ratio_min",
    "behave_imp_weight/max": "importance/ratio_max",
    "update/importance_weight/avg": "policy/ratio_mean",
    "update/importance_weight/min": "policy/ratio_min",
    "update/importance_weight/max": "policy/ratio_max",
    "importance_weight/avg": "policy/ratio_mean",
    "importance_weight/min": "policy/ratio_min",
    "importance_weight/max": "policy/ratio_max",
    "update/clip_ratio/avg": "policy/clip_fraction",
    "clip_ratio/avg": "policy/clip_fraction",
    "update/dual_clip_ratio/avg": "policy/dual_clip_fraction",
    "update/dual_clip_ratio": "policy/dual_clip_fraction",
    "dual_clip_ratio/avg": "policy/dual_clip_fraction",
    "update/rs_filtered_fraction": "importance/masked_fraction",
    "update/rs_filtered_fraction/avg": "importance/masked_fraction",
    "update/entropy/avg": "policy/entropy",
    "entropy/avg": "policy/entropy",
    "update/new_logp/avg": "policy/logprob_mean",
    "new_logp/avg": "policy/logprob_mean",
    "update/old_logp/avg": Key("rollout/entropy", "minus the mean logprob of the sampler", factor=-1),
    "old_logp/avg": Key("rollout/entropy", "minus the mean logprob of the sampler", factor=-1),
    "prompt_len/avg": "rollout/prompt_length_mean",
    "prompt_len/max": "rollout/prompt_length_max",
    "prompt_len/min": "rollout/prompt_length_min",
    "seq_len/avg": Key("rollout/total_length_mean", WITH_PROMPT),
    "seq_len/max": Key("rollout/total_length_max", WITH_PROMPT),
    "seq_len/min": Key("rollout/total_length_min", WITH_PROMPT),
    "no_eos_ratios/avg": Key("rollout/truncated_fraction", WIDTH),
    "update/version_stats/sample_staleness_theta_avg": "staleness/mean",
    "update/version_stats/sample_staleness_theta_max": "staleness/max",
    "update/version_stats/sample_staleness_theta_min": "staleness/min",
    "head_offpolicyness/avg": "staleness/mean",
    "head_offpolicyness/max": "staleness/max",
    "head_offpolicyness/min": "staleness/min",
    "timeperf/train_step": "time/update_s",
    "timeperf/rollout": "time/generate_s",
    "timeperf/update_weights": "time/load_weights_s",
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (r"timeperf/([^/]+)", "time/{0}_s"),
    (r"eval-rollout/(.+)", "eval/score/{0}"),
)

_STEP = re.compile(r"Epoch (\d+)/\d+ Step \d+/\d+ Train step (\d+)/\d+ done")
_VALUE = r"[-+]?\d\.\d+e[-+]\d+|nan|-?inf"


def console(lines: Iterator[str]) -> Iterator[Row]:
    """A line that names the step, then a boxed table with key and value in turn."""
    row: dict[str, Any] = {}
    for line in lines:
        match = _STEP.search(line)
        if match:
            if len(row) > 2:
                yield row
            row = {"epoch": match[1], "global_step": match[2]}
            continue
        cells = [cell.strip() for cell in re.split(r"[│|]", line) if cell.strip()]
        for key, value in pairwise(cells):
            if re.fullmatch(r"[\w.\-]+(?:/[\w.\-]+)+", key) and re.fullmatch(_VALUE, value):
                row[key] = value
    if len(row) > (2 if "global_step" in row else 0):
        yield row


OPTIONS = {
    "model.name": "actor.path",
    "model.dtype": "actor.dtype",
    "rollout.group_size": "gconfig.n_samples",
    "rollout.max_staleness": "rollout.max_head_offpolicyness",
    "sampling.temperature": "gconfig.temperature",
    "sampling.top_p": "gconfig.top_p",
    "sampling.top_k": "gconfig.top_k",
    "sampling.max_tokens": "gconfig.max_new_tokens",
    "sampling.stop": "gconfig.stop",
    "objective.beta": "actor.kl_ctl",
    "objective.clip_low": "actor.eps_clip",
    "objective.clip_high": "actor.eps_clip_higher",
    "objective.clip_delta": "actor.c_clip",
    "objective.importance_action": "actor.rejection_sampling.action",
    "objective.importance_level": "actor.rejection_sampling.level",
    "objective.importance_high": "actor.rejection_sampling.upper",
    "objective.importance_low": "actor.rejection_sampling.lower",
    "optimizer.learning_rate": "actor.optimizer.lr",
    "optimizer.max_grad_norm": "actor.optimizer.gradient_clipping",
    "optimizer.weight_decay": "actor.optimizer.weight_decay",
    "optimizer.minibatches": "actor.ppo_n_minibatches",
    "run.steps": "total_train_steps",
    "run.seed": "seed",
}


def convert(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that AReaL puts in other words."""
    settings: dict[str, Any] = {}
    action = options.get("actor.rejection_sampling.action")
    if action is not None:
        settings["objective.importance_action"] = {"clamp": "truncate"}.get(str(action), str(action))
    elif options.get("actor.use_decoupled_loss") in (False, True):
        # decoupled without a bound: the loss leaves the weight out, see the options' table of the framework
        settings["objective.importance_action"] = "off"
    return settings


AREAL = Framework(
    name="areal",
    words=("areal", "inclusionai"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("global_step", "step", "_step", "Step"),
    prefixes=("ppo_actor/", "ppo_critic/", "grpo_actor/"),
    marks=(r"Epoch \d+/\d+ Step \d+/\d+ Train step \d+/\d+ done", r"│\s*(?:ppo|grpo)_actor/"),
    console=console,
    could_log={
        "importance/ratio_mean": "actor.use_decoupled_loss=true",
        "importance/kl_k1": "actor.use_decoupled_loss=true",
        "importance/masked_fraction": "actor.rejection_sampling",
        "staleness/mean": "rollout.max_head_offpolicyness (> 0)",
        "kl/reward_term": "ref with actor.kl_ctl (> 0)",
    },
    options=OPTIONS,
    convert=convert,
    ignored=(r"step|epoch|epoch_step|global_step|_step|_runtime|_timestamp|memory/.*",),
)
