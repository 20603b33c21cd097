"""leadline itself: its names are the canonical ones."""

import re

from leadline.doctor.readers.frameworks.framework import Framework
from leadline.metrics import FOREIGN, QUANTITIES

_FAMILY = re.compile(r"[A-Z]+")

SETTINGS = (
    "model.name model.dtype model.device model.attention model.lora_rank model.lora_alpha model.gradient_checkpointing "
    "data.source data.max_prompt_tokens data.eval_source sampling.max_tokens sampling.temperature sampling.top_p "
    "sampling.top_k sampling.min_p sampling.repetition_penalty sampling.stop sampling.stop_token_ids engine.kind "
    "engine.dtype engine.max_batch rollout.group_size rollout.groups_per_step rollout.max_staleness rollout.refill "
    "objective.loss objective.aggregation objective.advantage_scaling objective.clip_low objective.clip_high "
    "objective.clip_delta objective.beta objective.kl_estimator objective.importance_level "
    "objective.importance_action objective.importance_low objective.importance_high objective.importance_veto "
    "objective.on_unscored objective.entropy_bonus objective.entropy_quantile objective.mask_truncated "
    "optimizer.learning_rate optimizer.warmup_steps optimizer.schedule optimizer.weight_decay "
    "optimizer.max_grad_norm optimizer.epochs_per_batch optimizer.minibatches eval.every eval.prompts run.steps "
    "run.seed run.dir"
).split()

LEADLINE = Framework(
    name="leadline",
    words=("leadline",),
    keys={q.name: q.name for q in (*QUANTITIES, *FOREIGN) if q.name != "step" and not _FAMILY.search(q.name)},
    patterns=tuple(
        (_FAMILY.sub("([^/]+)", q.name), _FAMILY.sub("{0}", q.name)) for q in QUANTITIES if _FAMILY.search(q.name)
    ),
    steps=("step", "_step", "Step"),
    could_log={
        "kl/k1": "objective.beta (> 0)",
        "kl/k3": "objective.beta (> 0)",
        "policy/entropy": "objective.entropy_bonus or objective.entropy_quantile",
        "eval/reward_mean": "eval.every with eval.prompts",
    },
    options={name: name for name in SETTINGS},
    ignored=(r"step|_step|_runtime|_timestamp",),
)
