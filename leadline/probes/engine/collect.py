"""Draws completions from the engine that is probed, as it stands: no weights are pushed to it first."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from leadline.data import render_prompt
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.engines.serve_command import server_options
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_server import VLLMServer, check_installed, free_port
from leadline.errors import ConfigError, DataError, EngineError
from leadline.models import Loaded
from leadline.probes.engine.drawn import Drawn, drawn_from
from leadline.settings.data import Data
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.settings.section import Dtype
from leadline.types import Prompt

PATIENCE_S = 30.0
"""For a server that is named and does not answer."""
START_S = 600.0
TEXTS = (
    "Summarise the following. " + "The lead line is a weighted rope with which a ship sounds the depth below its keel. "
    "Marks of leather, cloth and cord tell the leadsman by touch how many fathoms are out, even at night. "
    "A hollow in the lead is filled with tallow, so that it brings up sand, shells or mud from the ground. " * 6,
    "What is 17 + 25?",
    "Name three rivers in Europe, and say where each begins.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate to French: The cat sleeps on the warm stones.",
    "Explain in two sentences why the sky is blue.",
    "List the prime numbers below 30, one a line.",
    'Complete this JSON: {"name": "Ada", "born": 1815, "known for": ',
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Übersetze ins Deutsche: «Здравствуйте», 你好, and good morning 👋.",
    "Continue: once upon a time, in a harbour town where it always rained,",
    "Is 2027 a prime number? Think step by step.",
)
"""Long (more than a block of any prefix cache) and short, plain, code, digits and other scripts. The long one is first:
what costs a forward pass is tried on the first completions."""


def read_prompts(path: Path | None, loaded: Loaded) -> list[Prompt]:
    """The prompts of a file, one a line, or those built in; through the chat template if there is one.

    Raises DataError.
    """
    try:
        texts = TEXTS if path is None else path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--prompts is {str(path)!r}, but it cannot be read ({error}). Nothing can be sampled. Name a text file "
            "with one prompt a line, or leave the option out."
        ) from error
    rows = [text for text in texts if text.strip()]
    if not rows:
        raise DataError(f"--prompts is {str(path)!r}, but it has no lines. Nothing can be sampled. Write one a line.")
    settings = Data(source="-")
    rendered = [render_prompt(loaded.tokenizer, text, settings, {}) for text in rows]
    return [Prompt(i, text, tuple(ids)) for i, (text, ids) in enumerate(rendered)]


def draw(
    loaded: Loaded, name: str, engine: str, dtype: Dtype, prompts: Sequence[Prompt], count: int, sampling: Sampling
) -> Drawn:
    """`count` completions, spread over the prompts, from the engine: `hf`, `vllm` or the address of a server.

    Raises ConfigError, EngineError.
    """
    return asyncio.run(_draw(_engine(loaded, name, engine, dtype), prompts, count, sampling))


async def _draw(engine: Engine, prompts: Sequence[Prompt], count: int, sampling: Sampling) -> Drawn:
    shares = [len(range(i, count, len(prompts))) for i in range(len(prompts))]
    asked = [(prompt, n) for prompt, n in zip(prompts, shares, strict=True) if n]
    try:
        answers = await asyncio.gather(*(engine.generate(prompt, n, sampling) for prompt, n in asked))
    finally:
        await engine.close()
    pairs = [(i, prompt, c) for (prompt, _), found in zip(asked, answers, strict=True) for i, c in enumerate(found)]
    pairs.sort(key=lambda pair: pair[0])  # one of each prompt first: the first ones are to be of many kinds
    drawn = drawn_from([(prompt, completion) for _, prompt, completion in pairs])
    if not len(drawn.engine) or not bool(drawn.engine.isfinite().any()):
        raise EngineError(
            f"The engine drew {len(drawn.engine)} tokens, but scored none of them. There is nothing to compare. Let it "
            "report the logprobs of sampled tokens."
        )
    return drawn


def _engine(loaded: Loaded, name: str, engine: str, dtype: Dtype) -> Engine:
    if engine == "hf":
        return HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, dtype=dtype, own_copy=True)
    if engine != "vllm" and not engine.startswith(("http://", "https://")):
        raise ConfigError(
            f"--engine is {engine!r}, but it is neither hf, vllm nor an address. Nothing can be sampled. "
            "Write e.g. --engine http://127.0.0.1:8000."
        )
    if engine != "vllm":
        _check_answers(engine)
    server = _server(name, dtype) if engine == "vllm" else None
    return VLLMEngine(
        [server.url if server else engine],
        model_name=None,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.model.config.get_text_config().vocab_size,  # type: ignore[union-attr, operator]
        seed=0,
        settings=EngineSettings(kind="vllm", patience_s=START_S if server else PATIENCE_S),
        push=None,
        tokenizer=loaded.tokenizer,
        server=server,
    )


def _check_answers(url: str) -> None:
    try:
        httpx.get(url.rstrip("/") + "/health", timeout=PATIENCE_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise EngineError(
            f"--engine is {url!r}, but no vLLM server is well there ({type(error).__name__}: {error}). Nothing can be "
            "sampled. Start one with `leadline serve`, or name its address."
        ) from error


def _server(name: str, dtype: Dtype) -> VLLMServer:
    check_installed()
    options = server_options(name, port=free_port(), dtype=dtype, api_key=os.environ.get("VLLM_API_KEY"))
    return VLLMServer(options, Path(tempfile.gettempdir()) / f"leadline-probe-{os.getpid()}.log")
