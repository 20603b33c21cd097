"""A real vLLM for tests: servers of small random models, one at a time, and the engines on them.

Without vLLM the tests that need it are skipped; LEADLINE_REQUIRE_VLLM=1 forbids that.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from leadline.engines.serve_command import CPU_ARGUMENTS
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_server import ServerOptions, VLLMServer, free_port
from leadline.engines.vllm_snapshot import policy_score
from leadline.engines.vllm_weights import ServerPush
from leadline.models import Loaded, merged_weights
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, Prompt, Weights
from tests.engines.vllm_models import changed, llama, mixture, saved

PROCESSED = ServerOptions(model="").logprobs_mode
KEY = "a key of the tests"
TOLERANCE = 1e-4
"""Nats, float32 on both sides: 2e-6 to 8e-6 was measured on twenty architectures."""


def words() -> PreTrainedTokenizerFast:
    """Id 17 is the string `[17]`: tokens of several characters, so a stop string can end inside one."""
    backend = Tokenizer(WordLevel({f"[{i}]": i for i in range(260)}))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[1]", eos_token="[2]", pad_token="[0]")


def tied(seed: int = 0) -> Loaded:
    return replace(llama(seed, tied=True), tokenizer=words())


def untied(seed: int = 0) -> Loaded:
    return replace(llama(seed, tied=False), tokenizer=words())


MODELS: dict[str, Callable[[], Loaded]] = {"tied": tied, "mixture": mixture, "adapter": tied}
"""What a server is started from. The mixture has an output head of its own."""


@dataclass(frozen=True)
class Running:
    """A server, the model it was started from, and one with other weights."""

    kind: str
    server: VLLMServer
    a: Loaded
    b: Loaded

    @property
    def url(self) -> str:
        return self.server.url

    def push(self, loaded: Loaded, kind: Any = ServerPush, **options: Any) -> Any:
        score = policy_score(loaded.model)
        return kind(score, loaded.model.config.vocab_size, model=loaded.model, api_key=KEY, **options)

    def engine(self, loaded: Loaded, **settings: Any) -> VLLMEngine:
        return VLLMEngine(
            [self.url],
            model_name=None,
            eos_ids=settings.pop("eos_ids", frozenset()),
            vocab_size=loaded.model.config.vocab_size,
            seed=0,
            push=self.push(loaded, settings.pop("push", ServerPush)),
            say=settings.pop("say", lambda text: None),
            settings=EngineSettings(kind="vllm", urls=(self.url,), **settings),
            tokenizer=loaded.tokenizer,
        )

    def post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(self.url + route, json=body or {}, headers=headers, timeout=120, trust_env=False)

    def get(self, route: str) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.get(self.url + route, headers=headers, timeout=120, trust_env=False).json()

    def with_push(
        self, loaded: Loaded, body: Callable[[Any], Awaitable[Any]], kind: Any = ServerPush, **options: Any
    ) -> Any:
        async def run() -> Any:
            push = self.push(loaded, kind, **options)
            try:
                return await body(push)
            finally:
                await push.close()

        return asyncio.run(run())

    def serve(self, loaded: Loaded, version: int = 1) -> None:
        weights = merged_weights(loaded.model)
        self.with_push(loaded, lambda push: push.push(self.url, weights, version, f"{version}"))

    def probes(self, loaded: Loaded) -> float:
        """Mean distance in nats between what is served and the model. Raises EngineError past tolerance."""

        async def body(push: ServerPush) -> float:
            return await push.check_probes(self.url, await push.snapshot(merged_weights(loaded.model), 9), "float32")

        return float(self.with_push(loaded, body))

    def probes_after_reset(self, loaded: Loaded) -> float:
        """The same, without what is cached."""
        self.post("/reset_prefix_cache")
        return self.probes(loaded)

    def with_engine(self, loaded: Loaded, body: Callable[[VLLMEngine], Awaitable[Any]], **settings: Any) -> Any:
        async def run() -> Any:
            engine = self.engine(loaded, **settings)
            try:
                await engine.load_weights(merged_weights(loaded.model), 1)
                return await body(engine)
            finally:
                await engine.close()

        return asyncio.run(run())


class Servers:
    """At most one server runs: for a kind that does not, the one that does is stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: Running | None = None

    def get(self, kind: str) -> Running:
        if self.running is None or self.running.kind != kind or self.running.server.options.logprobs_mode != PROCESSED:
            self.stop()
            self.running = self._started(kind)
        return self.running

    def stop(self) -> None:
        if self.running is not None:
            self.running.server.stop()
            self.running = None

    def _started(self, kind: str) -> Running:
        a = MODELS[kind]()
        b = changed(a, 1)
        saved(b, self.folder / kind / "b")
        options = ServerOptions(
            model=str(saved(a, self.folder / kind / "a")),
            port=free_port(),
            api_key=KEY,
            max_lora_rank=8 if kind == "adapter" else None,
            **SMALL,
        )
        base = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = VLLMServer(options, self.folder / f"{kind}.log", base)
        server.start()
        running = Running(kind, server, a, b)
        self.running = running  # so that it is stopped also if it does not get ready
        asyncio.run(server.ready(240))
        return running


SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 24,
    "kv_cache_bytes": 64 << 20,
    "eager": True,
    "arguments": CPU_ARGUMENTS,
}
"""Options of a server for tests."""


class OnServer:
    """An engine on a server that others use too: its model's weights are pushed before it samples."""

    def __init__(self, running: Running, loaded: Loaded) -> None:
        self.engine = running.engine(loaded, eos_ids=loaded.eos_ids)
        self.loaded = loaded
        self._ready = False
        self._starting = asyncio.Lock()

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        async with self._starting:
            if not self._ready:
                await self.load_weights(merged_weights(self.loaded.model), 0)
        return await self.engine.generate(prompt, n, sampling)

    async def load_weights(self, weights: Weights, version: int) -> None:
        await self.engine.load_weights(weights, version)
        self._ready = True

    async def close(self) -> None:
        await self.engine.close()


class InProcess:
    """The one vLLM of this process, for a model of its kind; closing it only ends what runs."""

    def __init__(self, engine: Any, loaded: Loaded) -> None:
        self.engine = engine
        self.loaded = loaded
        self._ready = False
        self._starting = asyncio.Lock()
        engine._eos_ids, engine._score, engine._model = loaded.eos_ids, policy_score(loaded.model), loaded.model
        engine._loading, engine._closed = asyncio.Lock(), False

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        async with self._starting:
            if not self._ready:
                await self.load_weights(merged_weights(self.loaded.model), 0)
        return list(await self.engine.generate(prompt, n, sampling))

    async def load_weights(self, weights: Weights, version: int) -> None:
        await self.engine.load_weights(weights, version)
        self._ready = True

    async def close(self) -> None:
        self.engine._closed = True
        await self.engine._until_idle()


def gap(distance_from: torch.Tensor, completion: Completion) -> torch.Tensor:
    """Of each reported logprob from the one expected, in nats."""
    return (torch.tensor(completion.logprobs) - distance_from).abs()
