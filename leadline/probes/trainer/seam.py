"""The installed TRL's own loss, advantages and rollout weights as functions of a `ProbeBatch`.

A real GRPOTrainer is built; only the model's forward pass and the sampler are replaced by the batch's numbers, so that
values and gradients are those of its code.
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.decoding import byte_tokenizer


def build_trainer(settings: Mapping[str, Any]) -> Any:
    """A GRPOTrainer with these settings, on the CPU, of a model with a few thousand weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    values: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 6,
        "num_generations": 3,
        "beta": 0.0,
        **settings,
    }
    use_vllm, beta = values.pop("use_vllm", False), values.pop("beta")
    trainer = GRPOTrainer(
        model=_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**values),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=byte_tokenizer(),
    )
    # After it is built, for both would load: the sampler and the reference are replaced by the batch's numbers.
    trainer.use_vllm, trainer.beta = use_vllm, beta
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def loss_of(trainer: Any, micro_batches: int = 1) -> Callable[[ProbeBatch], Tensor]:
    """Its loss; with several micro-batches the sum over them, as gradient accumulation makes it."""

    def loss(batch: ProbeBatch) -> Tensor:
        trainer.max_completion_length = batch.max_tokens
        trainer.current_gradient_accumulation_steps = micro_batches
        trainer.args.steps_per_generation = micro_batches
        rows = torch.arange(batch.shape[0]).chunk(micro_batches)
        return torch.stack([_part(trainer, batch, part) for part in rows]).sum()

    return loss


def advantages_of(trainer: Any) -> Callable[[ProbeBatch], Tensor]:
    """Its advantages from the batch's rewards, the completions of a prompt next to each other."""
    return lambda batch: _scored(trainer, batch)["advantages"]


def weights_of(trainer: Any) -> Callable[[ProbeBatch], Tensor]:
    """Its rollout weights of the trained tokens, from old and rollout logprobs."""

    def weights(batch: ProbeBatch) -> Tensor:
        ratio: Tensor = _scored(trainer, batch)["importance_sampling_ratio"]
        return ratio.expand(batch.shape)[batch.loss_mask]

    return weights


def _part(trainer: Any, batch: ProbeBatch, rows: Tensor) -> Tensor:
    """The loss of some completions."""
    logprobs = batch.logprobs[rows]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.ones_like(logprobs), None)
    mask = batch.loss_mask.long()
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
        "completion_ids": batch.token_ids[rows],
        "completion_mask": mask[rows],
        "advantages": batch.advantages[rows],
        "old_per_token_logps": batch.old_logprobs[rows],
        "ref_per_token_logps": batch.ref_logprobs[rows],
        "num_items_in_batch": mask.sum(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = batch.rollout_weights[rows]
    loss: Tensor = trainer._compute_loss(trainer.model, inputs)
    return loss


def _scored(trainer: Any, batch: ProbeBatch) -> dict[str, Any]:
    """What its generation step makes of the batch's completions, logprobs and rewards."""
    lengths = batch.loss_mask.sum(-1).tolist()
    rows = len(batch.rewards)
    completions = [batch.token_ids[i, :length].tolist() for i, length in enumerate(lengths)]
    sampled = [batch.rollout_logprobs[i, :length].tolist() for i, length in enumerate(lengths)]
    generated: Any = ([[1]] * rows, completions, None, [""] * rows, sampled, {}, None, None)
    trainer._generate = lambda prompts: generated
    trainer._calculate_rewards = lambda *_: batch.rewards[:, None]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.old_logprobs, None, None)
    trainer.num_generations = batch.group_size
    scored: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": "a"}] * rows)
    return scored


@cache
def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(byte_tokenizer()),
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )
