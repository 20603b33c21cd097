"""The hf engine on a tiny model: what its tests share."""

import asyncio
from dataclasses import replace

import torch
from torch import Tensor, nn

from leadline.engines.hf import HFEngine
from leadline.models import Loaded, load_model
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt

PROMPTS = [
    Prompt(index=i, text="", token_ids=tuple(range(5 + i, 5 + i + length)))
    for i, length in enumerate((3, 40, 1, 17, 17, 64))
]


def tiny(**settings: object) -> Loaded:
    loaded = load_model(Model.model_validate({"name": "tiny", "device": "cpu", **settings}))
    return replace(loaded, eos_ids=frozenset())  # nothing ends a completion but what a test adds


def make(loaded: Loaded, **options: object) -> HFEngine:
    return HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, **options)


def generate(engine: HFEngine, sampling: Sampling, prompts: list[Prompt], n: int) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        groups = await asyncio.gather(*(engine.generate(prompt, n, sampling) for prompt in prompts))
        await engine.close()
        return groups

    return asyncio.run(run())


def plain_logprobs(model: nn.Module, prompt: Prompt, completion: Completion) -> Tensor:
    """At temperature 1, by one forward of this sequence alone: no cache, no padding, no batch."""
    ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    begin = len(prompt.token_ids)
    return logprobs[begin - 1 : -1].gather(-1, ids[begin:, None]).squeeze(-1)


async def first_tokens(engine: HFEngine) -> None:
    """Returns once every running completion has a few tokens."""
    while not engine._decoder._rows or any(len(row.token_ids) < 5 for row in engine._decoder._rows):
        await asyncio.sleep(0)


def assert_exact(model: nn.Module, prompt: Prompt, completion: Completion) -> None:
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), plain_logprobs(model, prompt, completion), atol=1e-4, rtol=0
    )


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]
