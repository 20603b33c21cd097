"""Small real runs of TRL on the CPU: a random model, a byte tokenizer, no download."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

from leadline.integrations.trl import DoctorCallback
from tests.byte_tokenizer import byte_tokenizer

ENDS = 20
"""Tokens that end a completion: an untrained model meets one after thirteen tokens on average."""


def tiny_model(hidden: int = 32, layers: int = 2, ends: int = ENDS) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(60, 60 + ends)]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def distinct_letters(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that varies among random completions."""
    return [len(set(text)) / 10 for text in completions]


def build(
    path: Path,
    callback: DoctorCallback | None,
    reward: Callable[..., Any] = distinct_letters,
    model: Qwen2ForCausalLM | None = None,
    trainer_class: Any = None,
    config_class: Any = None,
    rollout: Any = None,
    **settings: Any,
) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    values: dict[str, Any] = {
        "output_dir": str(path),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 96,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-6,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        **settings,
    }
    prompts = Dataset.from_dict({"prompt": [f"Say {i}:" for i in range(64)]})
    return (trainer_class or GRPOTrainer)(
        model=model or tiny_model(),
        reward_funcs=reward,
        args=(config_class or GRPOConfig)(**values),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(8)),
        processing_class=byte_tokenizer(),
        callbacks=[callback] if callback else [],
        **({"rollout_func": rollout} if rollout else {}),
    )


class FakeVLLM:
    """Stands in for TRL's vLLM backend: samples with the trainer's model, its logprobs off by a constant."""

    offset = 0.0

    def __init__(self, model: Any, max_completion_length: int, **_: Any) -> None:
        self.model = model
        self.length = max_completion_length

    def sync_weights(self) -> None:
        """The weights are shared."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], num_generations: int, **_: Any) -> Any:
        width = max(len(prompt) for prompt in prompts)
        pad = self.model.generation_config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        training = self.model.training
        self.model.eval()
        whole = self.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=self.length, use_cache=True
        )
        attention = torch.cat([mask, torch.ones(len(ids), whole.size(1) - width, dtype=mask.dtype)], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = self.model(input_ids=whole, attention_mask=attention, position_ids=positions).logits
        logprobs = logits.log_softmax(-1)[:, width - 1 : -1].gather(2, whole[:, width:, None]).squeeze(2)
        self.model.train(training)
        ends = set(self.model.generation_config.eos_token_id)
        completions, scores = [], []
        for tokens, values in zip(whole[:, width:].tolist(), (logprobs + self.offset).tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            completions.append(tokens[:length])
            scores.append([[value] for value in values[:length]])
        return None, completions, scores, None


def fixed_rollout(ending: str) -> Callable[..., Any]:
    """Completions of random letters, each with this ending; the sampler says nothing about their probability."""

    def rollout(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        random = torch.Generator().manual_seed(int(trainer.state.global_step))
        tokenizer = trainer.processing_class
        letters = torch.tensor(tokenizer("abcdefghijklmnopqrst")["input_ids"])
        completions = [
            letters[torch.randint(len(letters), (8 + i % 5,), generator=random)].tolist()
            + tokenizer(ending)["input_ids"]
            for i in range(len(prompts))
        ]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": None,
        }

    return rollout


def run(trainer: Any) -> None:
    """Trains; a crash of TRL on NaN weights is part of what is watched."""
    with contextlib.suppress(RuntimeError):
        trainer.train()


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]
