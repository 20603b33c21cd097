"""The vLLM client with a real model behind the fake server: what the wire does to completions, without vLLM."""

import asyncio
from typing import Any

from leadline.engines.hf import HFEngine
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_snapshot import PROBE_PROMPT, Score, probe_ids
from leadline.models import Loaded
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, FinishReason, Prompt, Weights
from tests.engines.fake_vllm import Body, FakeVLLM

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class ServedModel:
    """An engine: a vLLM client, a server on a port of its own, and a copy of the model in it."""

    def __init__(self, loaded: Loaded, **settings: Any) -> None:
        # Without ends of its own: what ends a completion is in the requests.
        self.model = HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=frozenset(), own_copy=True)
        self.loaded = loaded
        self.settings = EngineSettings(kind="vllm", **settings)
        self.server = FakeVLLM(self._draw)
        self.score: Score | None = None
        """The policy's: with it, the server's logprobs are examined before it serves."""
        self.said: list[str] = []
        self.probe_ids = probe_ids(loaded.model.config.vocab_size)
        self.client: VLLMEngine | None = None
        self._starting = asyncio.Lock()

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        return await (await self._client()).generate(prompt, n, sampling)

    async def load_weights(self, weights: Weights, version: int) -> None:
        await (await self._client()).load_weights(weights, version)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
            await self.server.kill()
        await self.model.close()

    async def prepare(self, weights: Weights, version: int) -> Any:
        return None if self.score is None else self.score(weights, self.probe_ids)[PROBE_PROMPT - 1 : -1]

    async def push(self, url: str, weights: Weights, version: int, name: str) -> None:
        await self.model.load_weights(weights, version)

    async def _client(self) -> VLLMEngine:
        async with self._starting:
            if self.client is None:
                await self.server.start()
                self.client = VLLMEngine(
                    [self.server.url],
                    model_name=None,
                    eos_ids=self.loaded.eos_ids,
                    vocab_size=self.loaded.model.config.vocab_size,
                    seed=0,
                    settings=self.settings,
                    push=self,
                    tokenizer=self.loaded.tokenizer,
                    say=self.said.append,
                )
        return self.client

    async def _draw(self, request: Body, aborted: asyncio.Event) -> list[Body]:
        """The seed of the request stands in the index of the prompt: draws depend on nothing else of it."""
        prompt = Prompt(index=request["seed"], text="", token_ids=tuple(request["prompt"]))
        sampling = Sampling(
            max_tokens=request["max_tokens"],
            temperature=float(request["temperature"]),
            top_p=request["top_p"],
            top_k=max(0, request["top_k"]),
            min_p=request["min_p"],
            repetition_penalty=request["repetition_penalty"],
            stop=tuple(request["stop"]),
            stop_token_ids=tuple(request["stop_token_ids"]),
        )
        return [self._choice(c, sampling) for c in await self.model.generate(prompt, request["n"], sampling)]

    def _choice(self, completion: Completion, sampling: Sampling) -> Body:
        reason: int | str | None = None
        if completion.finish_reason is FinishReason.STOP:
            text = self.loaded.tokenizer.decode(list(completion.token_ids))
            strings = [s for s in sampling.stop if s in text]
            last = completion.token_ids[-1]
            reason = last if last in sampling.stop_token_ids else strings[0]
        return {
            "token_ids": list(completion.token_ids),
            "token_logprobs": list(completion.logprobs),
            "finish_reason": REASONS[completion.finish_reason],
            "stop_reason": reason,
        }
