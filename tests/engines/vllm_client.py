"""The vLLM client, and the server that misbehaves on purpose: what its tests share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from leadline.engines.vllm_http import VLLMEngine
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, Prompt
from tests.engines.fake_vllm import EOS, VOCAB, Body, FakePush, FakeVLLM, Reply

SAMPLING = Sampling(max_tokens=16)
HTML = b"<html><body>502 Bad Gateway</body></html>"


def prompt(index: int = 0, length: int = 3) -> Prompt:
    return Prompt(index=index, text="", token_ids=tuple(range(10, 10 + length)))


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value)}


def engine_for(
    *servers: FakeVLLM, push: FakePush | None = None, said: list[str] | None = None, **changes: Any
) -> VLLMEngine:
    settings = EngineSettings(kind="vllm", **{"patience_s": 5.0, "request_timeout_s": 5.0, **changes})
    return VLLMEngine(
        [server.url for server in servers],
        model_name=settings.model_name,
        eos_ids=frozenset({EOS}),
        vocab_size=VOCAB,
        seed=3,
        settings=settings,
        push=push or FakePush(*servers),
        tokenizer=None,
        say=(said if said is not None else []).append,
    )


def with_servers(count: int, test: Callable[..., Awaitable[Any]], *draws: Any) -> Any:
    """Run `test(*servers)` with as many servers; nothing may take longer than 20 s."""

    async def run() -> Any:
        servers = [FakeVLLM(*draws) for _ in range(count)]
        for server in servers:
            await server.start()
        try:
            async with asyncio.timeout(20):
                return await test(*servers)
        finally:
            for server in servers:
                await server.kill()

    return asyncio.run(run())


def generate(trouble: Callable[[Body, Body], Body | Reply] | None = None, *, times: int = 1, n: int = 4) -> Any:
    """The group of one prompt by a server that is wrong the first `times` times, and how often it was asked."""

    async def test(server: FakeVLLM) -> tuple[list[Completion], int]:
        if trouble is not None:
            server.troubles.extend([trouble] * times)
        engine = engine_for(server)
        try:
            return await engine.generate(prompt(), n, SAMPLING), len(server.requests)
        finally:
            await engine.close()

    return with_servers(1, test)


def status(code: int, body: bytes = b"no", headers: str = "") -> Callable[[Body, Body], Reply]:
    return lambda request, answer: Reply(code, body, headers)
