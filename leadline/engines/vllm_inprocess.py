"""vLLM inside the trainer's process: no server, no file, the weights are handed over as they lie in memory."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from leadline.engines.vllm_core import add_request, can_sleep, dtype_of, start_engine
from leadline.engines.vllm_server import ServerOptions
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBE_TOP, PROBES, Score, plain_tensors, probe_ids
from leadline.engines.vllm_weights import TOLERANCE
from leadline.engines.vllm_wire import Ask
from leadline.engines.vllm_worker import fingerprints, serve_weights
from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt, Weights

T = TypeVar("T")


@dataclass(slots=True)
class Draw:
    """One completion while it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT

    def completion(self) -> Completion:
        return Completion(tuple(self.token_ids), tuple(self.logprobs), tuple(self.policy_versions), self.finish_reason)


@dataclass(slots=True)
class Request:
    """One call of `generate`, until all of its completions are finished."""

    ask: Ask
    draws: list[Draw]
    future: asyncio.Future[list[Completion]]
    left: int
    """Completions that are not finished."""


class VLLMInProcess:
    """Completions from a vLLM that shares the process, one step of its batch at a time on a thread of its own.

    New weights come in between two steps; completions under way go on with them, their keys and values computed anew,
    and each token carries the version that drew it; or, with `drain`, they are finished first. Every load is proved like
    a push to a server.

    With `yields_memory` vLLM sleeps whenever nothing runs, if it can (on a GPU): its cache and its weights leave the device
    to the policy, and are back before the next request or load.

    `options` as for a server (host, port and key mean nothing here). Raises EngineError if vLLM is not installed.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        eos_ids: frozenset[int],
        vocab_size: int,
        seed: int,
        score: Score | None = None,
        model: Any = None,
        drain: bool = False,
        yields_memory: bool = False,
    ) -> None:
        """`score`: the policy's own; without it loads are not probed. `model` knows the names of its checkpoints."""
        self._engine = start_engine(options)
        self._eos_ids, self._vocab_size, self._seed = eos_ids, vocab_size, seed
        self._score, self._model = score, model
        self._drains, self._yields = drain, yields_memory and can_sleep()
        self._asleep = False
        self._version = 0
        self._requests: dict[str, Request] = {}
        self._missed: list[tuple[Any, int]] = []
        self._names = itertools.count()
        # One thread for all that touches the engine: weights change between two steps by themselves.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        self._driver: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self._closed = False

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions of the prompt, in the order of their draws."""
        greedy = sampling.temperature == 0  # vLLM draws one only; all of them are that one
        ask = Ask(prompt, 1 if greedy else n, sampling, self._eos_ids, self._vocab_size, self._seed)
        completions = await self._ask(ask)
        return completions * n if greedy else completions

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Tokens drawn from now on are drawn from `weights` and carry `version`. Raises EngineError."""
        self._check_open()
        async with self._loading:  # nothing new begins meanwhile
            if self._drains:
                await self._until_idle()
            await self._on_worker(lambda: self._load(weights, version))
            if self._score is not None:
                await self._check_probes(weights, version)

    async def close(self) -> None:
        """Running completions return what they have, with the finish reason ABORT."""
        self._closed = True
        async with self._loading:
            await self._until_idle()
            await self._on_worker(self._engine.engine_core.shutdown)
            self._worker.shutdown()

    # ---- the batch

    async def _ask(self, ask: Ask) -> list[Completion]:
        draws = [Draw() for _ in range(ask.n)]
        request = Request(ask, draws, asyncio.get_running_loop().create_future(), left=ask.n)
        name = str(next(self._names))
        async with self._loading:
            self._check_open()
            self._requests[name] = request
            try:
                await self._on_worker(lambda: self._add(name, ask))
            except ValueError as error:
                del self._requests[name]
                raise EngineError(
                    f"Prompt {ask.prompt.index} has {len(ask.prompt.token_ids)} tokens, but vLLM refuses the request: "
                    f"{error}. It cannot be sampled. Lower data.max_prompt_tokens or sampling.max_tokens."
                ) from error
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
        return await request.future

    async def _drive(self) -> None:
        """Step until nothing runs."""
        while self._requests:
            if self._closed:
                await self._abort_all()
                return
            try:
                outputs = await self._on_worker(self._step)
            except Exception as error:
                self._fail(error)
                return
            for output in outputs:
                self._take(output)
            if not self._requests:
                await self._on_worker(self._sleep)  # a request may come in meanwhile

    async def _abort_all(self) -> None:
        for name in list(self._requests):
            await self._on_worker(lambda name=name: self._engine.abort_request([name]))  # type: ignore[misc]
            self._resolve(name)

    async def _until_idle(self) -> None:
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])  # waited for, not awaited: a cancelled load must not cancel it

    def _add(self, name: str, ask: Ask) -> None:
        self._wake()
        add_request(self._engine, name, ask)

    def _wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def _sleep(self) -> None:
        """Unless a request has come in."""
        if self._yields and not self._asleep and not self._engine.has_unfinished_requests():
            self._engine.sleep(level=1)  # weights go to the CPU, the cache is dropped
            self._asleep = True

    def _step(self) -> list[tuple[Any, int]]:
        """The outputs of one step, with the version that drew them; those that the probes came across first."""
        missed, self._missed = self._missed, []
        return missed + [(output, self._version) for output in self._engine.step()]

    def _take(self, output: tuple[Any, int]) -> None:
        grown, version = output
        request = self._requests.get(grown.request_id)
        if request is None:
            return
        for choice in grown.outputs:
            draw = request.draws[choice.index]
            draw.token_ids += choice.token_ids
            draw.logprobs += [at[token].logprob for at, token in zip(choice.logprobs, choice.token_ids, strict=True)]
            draw.policy_versions += [version] * len(choice.token_ids)
            if choice.finish_reason is not None:
                draw.finish_reason = _finish_reason(choice, draw, request.ask)
                request.left -= 1
        if not request.left:
            self._resolve(grown.request_id)

    def _resolve(self, name: str) -> None:
        request = self._requests.pop(name)
        if not request.future.done():
            request.future.set_result([draw.completion() for draw in request.draws])

    def _fail(self, error: Exception) -> None:
        """vLLM cannot go on after an exception in a step."""
        self._closed = True
        for request in self._requests.values():
            if not request.future.done():
                request.future.set_exception(
                    EngineError(
                        f"vLLM failed inside the process ({type(error).__name__}: {error}). Nothing can be sampled. "
                        "Resume the run from its last checkpoint, with engine.kind = 'vllm' if it happens again."
                    )
                )
        self._requests.clear()

    # ---- weights

    def _load(self, weights: Weights, version: int) -> None:
        self._wake()
        tensors = plain_tensors(weights, self._model)
        [receipt] = self._engine.collective_rpc(lambda worker: serve_weights(worker, tensors))
        if "refused" in receipt:
            raise EngineError(
                f"New weights were handed to vLLM, but it refused them: {receipt['refused']}. It still samples from the "
                "old ones. Start it from the model that is trained."
            )
        sent = fingerprints({name: tensors[name] for name in receipt["live"]})
        stale = sorted(name for name, mark in receipt["live"].items() if sent[name] != mark)
        if stale or not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(
                f"New weights were handed to vLLM, but {stale[:3] or 'its prefix cache'} is still of the old ones. It "
                "would sample from a mixture. Resume the run from its last checkpoint."
            )
        self._version = version

    async def _check_probes(self, weights: Weights, version: int) -> None:
        ids = probe_ids(self._vocab_size)
        score = self._score
        assert score is not None
        expected = await asyncio.to_thread(score, weights, ids)
        answers = await self._on_worker(lambda: self._probe(ids))
        distances = [
            abs(logprob - float(expected[PROBE_PROMPT - 1 + i, token]))
            for i, answer in enumerate(answers)
            for token, logprob in answer.items()
        ]
        mean, limit = sum(distances) / len(distances), TOLERANCE[dtype_of(self._engine)]
        if not mean <= limit:
            raise EngineError(
                f"The weights of version {version} were handed to vLLM, but the logprobs of {len(distances)} probe tokens "
                f"differ from the policy's by {mean:.3g} nats on average ({limit} is rounding). It samples from other "
                "weights than those that are trained. Use engine.kind = 'hf', and report the architecture."
            )

    def _probe(self, ids: list[int]) -> list[Mapping[int, float]]:
        """For each probe the logprobs of the most probable next tokens."""
        from vllm import SamplingParams, TokensPrompt

        knobs = SamplingParams(max_tokens=1, temperature=1.0, logprobs=PROBE_TOP, seed=0)
        names = [f"probe-{i}" for i in range(PROBES)]
        for i, name in enumerate(names):
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=ids[: PROBE_PROMPT + i]), knobs)
        found: dict[str, Mapping[int, float]] = {}
        while len(found) < PROBES:
            for output, version in self._step():
                if output.request_id in names:
                    [at_first_token] = output.outputs[0].logprobs
                    found[output.request_id] = {token: entry.logprob for token, entry in at_first_token.items()}
                else:
                    self._missed.append((output, version))
        return [found[name] for name in names]

    async def _on_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(
                "The vLLM engine is closed, but it was asked for more. Nothing can run. Make a new engine."
            )


def _finish_reason(choice: Any, draw: Draw, ask: Ask) -> FinishReason:
    """As vLLM says, with EOS and STOP told apart by what ended it."""
    if choice.finish_reason == "length":
        return FinishReason.LENGTH
    if choice.finish_reason != "stop":
        return FinishReason.ABORT
    return FinishReason.EOS if draw.token_ids[-1] in ask.eos_ids else FinishReason.STOP
