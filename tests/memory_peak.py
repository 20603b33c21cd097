"""The forecast of one update of a small random Llama, and the most bytes that its tensors hold at once."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from leadline.config import Config
from leadline.models import Loaded
from leadline.policy.attention import recomputing_contexts
from leadline.policy.batch import Batch, build_batch
from leadline.policy.memory import Shape, forecast
from leadline.policy.policy import Policy
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import settings


@dataclass(frozen=True)
class Case:
    """Groups of one shape, so many in a step and in a micro-batch, which they fill: less than that is no test of it."""

    shape: Shape
    groups: int
    groups_per_micro: int
    model: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    chunks: bool = True
    """Logits exist for a chunk at a time."""


BF16, RECOMPUTING = {"dtype": "bfloat16"}, {"gradient_checkpointing": True}
CASES = {
    "long prompts": Case(Shape(512, 64, 8), 1, 1),
    "long completions": Case(Shape(32, 192, 8), 2, 1),
    "several micro-batches": Case(Shape(128, 64, 8), 6, 3),
    "layers outweigh logits": Case(Shape(1024, 8, 8), 2, 1),
    "bfloat16": Case(Shape(256, 64, 8), 2, 2, BF16),
    "bfloat16 in micro-batches": Case(Shape(256, 64, 8), 2, 1, BF16),
    "recomputing": Case(Shape(256, 64, 8), 4, 2, RECOMPUTING),
    "recomputing long prompts": Case(Shape(1024, 8, 8), 4, 2, RECOMPUTING),
    "whole logits": Case(Shape(256, 64, 8), 1, 1, chunks=False),
    "top-k": Case(Shape(256, 64, 8), 1, 1, sampling={"top_k": 20}),
    "top-p": Case(Shape(256, 64, 8), 1, 1, sampling={"top_p": 0.9}),
    "min-p where all stay": Case(Shape(256, 64, 8), 1, 1, sampling={"min_p": 0.001}),
    "everything in bfloat16": Case(
        Shape(256, 64, 8), 1, 1, BF16, sampling={"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}
    ),
    "repetition penalty": Case(Shape(256, 64, 8), 1, 1, sampling={"repetition_penalty": 1.1}),
}
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def batch_of(shape: Shape, count: int, config: Config) -> Batch:
    """`count` groups of this shape, all with a gradient."""

    def rollout(reward: float) -> Rollout:
        n = shape.completion
        return Rollout(Completion((7,) * n, (-1.0,) * n, (0,) * n, FinishReason.EOS), "", reward=reward)

    group = Group(Prompt(0, "", (5,) * shape.prompt), [rollout(float(i)) for i in range(shape.group)])
    return build_batch([group] * count, config, 0)


def measure(case: Case) -> tuple[int, int]:
    """Bytes of an update above what always stays: forecast, and measured."""
    tokens = case.groups_per_micro * case.shape.tokens
    config = settings(
        model=case.model,
        sampling={"max_tokens": case.shape.completion, **case.sampling},
        rollout={"group_size": case.shape.group, "groups_per_step": case.groups},
        optimizer={"tokens_per_micro": tokens},
    )
    policy = random_policy(config)
    if not case.chunks:
        policy.head = None
    policy.update(batch_of(Shape(8, 4, 2), 1, config))  # allocates AdamW's moments
    expected = sum(forecast(policy, case.shape, tokens).updating.values())
    batch = batch_of(case.shape, case.groups, config)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy.update(batch)
    return expected, most_alive(profiler)


def random_policy(config: Config) -> Policy:
    """Of the small Llama, with the config's dtype and recomputation."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, config.model.dtype)).eval()
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recomputing_contexts})
    return Policy(Loaded(model, None, frozenset({2}), None), config)


def most_alive(profiler: profile) -> int:
    """The most bytes that were allocated and not yet freed: the same on every machine, whatever its allocator does."""
    alive = most = 0
    assert profiler.profiler is not None
    for (
        event
    ) in profiler.profiler.kineto_results.events():  # in the order of time; the public events lump them together
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most
