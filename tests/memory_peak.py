"""Run as a process of its own: the forecast and the measured peak of one update of a small random Llama."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leadline.attention import recomputing_contexts
from leadline.batch import Batch, build_batch
from leadline.config import Config
from leadline.memory import Shape, forecast
from leadline.models import Loaded
from leadline.policy import Policy
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import settings

CASES = {
    "long prompts": (Shape(512, 64, 8), 1, "float32", False),
    "long completions": (Shape(32, 192, 8), 2, "float32", False),
    "several micro-batches": (Shape(128, 64, 8), 8, "float32", False),
    "bfloat16": (Shape(256, 64, 8), 2, "bfloat16", False),
    "recomputing": (Shape(256, 64, 8), 4, "float32", True),
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


def measure(case: str) -> dict[str, int]:
    """Bytes of an update above what always stays: forecast, and measured by the resident set."""
    shape, count, dtype, recomputing = CASES[case]
    config = settings(
        model={"dtype": dtype, "gradient_checkpointing": recomputing},
        sampling={"max_tokens": shape.completion},
        rollout={"group_size": shape.group, "groups_per_step": count},
        optimizer={"tokens_per_micro": 2048},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, dtype)).eval()
    if recomputing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputing_contexts})
    policy = Policy(Loaded(model, None, frozenset({2}), None), config)
    policy.update(batch_of(Shape(8, 4, 2), 1, config))  # loads kernels, and allocates AdamW's moments
    expected = sum(forecast(policy, shape, 2048).updating.values())
    batch = batch_of(shape, count, config)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    policy.update(batch)
    return {"forecast": expected, "measured": resident("VmHWM") - before}


def resident(name: str) -> int:
    """VmRSS, bytes resident now, or VmHWM, the most there were."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
