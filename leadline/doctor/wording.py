"""Advice in the words of the run's framework: its own options where it has them, plain words where it has none."""

import re
from collections.abc import Callable

PLAIN = {
    "data.source": "the data",
    "decoding.reasoning_close": "the closing marker of the reasoning",
    "decoding.reasoning_open": "the opening marker of the reasoning",
    "model.chat_template_kwargs": "the arguments of the chat template",
    "model.dtype": "the dtype of training",
    "model.gradient_checkpointing": "gradient checkpointing",
    "model.lora_rank": "a LoRA rank",
    "model.lora_targets": "the target modules of the adapter",
    "objective.advantage_epsilon": "the epsilon added to the std",
    "objective.aggregation": "the aggregation of the loss",
    "objective.beta": "the KL coefficient",
    "objective.clip_high": "the upper clip",
    "objective.clip_low": "the lower clip",
    "objective.entropy_bonus": "the entropy bonus",
    "objective.entropy_quantile": "the entropy quantile",
    "objective.importance_action": "the action of the importance correction",
    "objective.importance_high": "the upper bound of the importance weights",
    "objective.importance_level": "the level of the importance correction",
    "objective.importance_low": "the lower bound of the importance weights",
    "objective.kl_estimator": "the KL estimator",
    "objective.loss": "the loss",
    "objective.mask_truncated": "masking of truncated completions",
    "objective.on_unscored": "the treatment of tokens without a logprob",
    "objective.overlong_buffer": "a soft penalty for the last tokens before the limit",
    "optimizer.epochs_per_batch": "the passes over a batch",
    "optimizer.learning_rate": "the learning rate",
    "optimizer.max_grad_norm": "the bound of the gradient norm",
    "optimizer.minibatches": "the mini-batches per batch",
    "optimizer.tokens_per_micro": "the size of a micro-batch",
    "optimizer.warmup_steps": "the warm-up",
    "rewards.timeout_s": "the timeout of the reward",
    "rewards.weight": "its weight",
    "rollout.group_size": "the completions per prompt",
    "rollout.groups_per_step": "the prompts per step",
    "rollout.max_staleness": "the bound of staleness",
    "rollout.refill": "dynamic sampling",
    "sampling.max_tokens": "the limit of completion tokens",
    "sampling.min_p": "min_p",
    "sampling.stop": "stop strings",
    "sampling.stop_token_ids": "ids of end tokens",
    "sampling.temperature": "the temperature",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
}
"""What a setting is, for frameworks without an option of that kind."""

_SETTING = re.compile(r"`([a-z]+\.[a-z_]+)([^`]*)`")


def worded(text: str, option: Callable[[str], str | None]) -> str:
    """The text with our settings (in backticks) replaced by the framework's options, or by plain words."""

    def replaced(match: re.Match[str]) -> str:
        name, rest = match[1], match[2]
        known = option(name)
        return f"`{known}{rest}`" if known else f"{PLAIN.get(name, f'`{name}`')}{rest}"

    return _SETTING.sub(replaced, text)
