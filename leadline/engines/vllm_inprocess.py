"""vLLM inside the trainer's process: no server, no file, the weights are handed over as they lie in memory."""

import asyncio
import itertools
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from leadline.engines.vllm_server import ServerOptions, check_installed
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBES, Score, plain_tensors, probe_ids
from leadline.engines.vllm_weights import PROBE_TOP, TOLERANCE
from leadline.engines.vllm_wire import Ask, request_body
from leadline.engines.vllm_worker import fingerprints, serve_weights
from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt, Weights

T = TypeVar("T")

OF_THE_WIRE = {"model", "prompt", "return_token_ids", "return_tokens_as_token_ids", "echo", "stream"}
"""What a request over the wire holds besides the knobs, which vLLM's SamplingParams take by the same names."""


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
    and each token carries the version that drew it. Every load is proved like a push to a server.

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
    ) -> None:
        """`score`: the policy's own; without it loads are not probed. `model` knows the names of its checkpoints."""
        self._engine = _start(options)
        self._eos_ids, self._vocab_size, self._seed = eos_ids, vocab_size, seed
        self._score, self._model = score, model
        self._version = 0
        self._requests: dict[str, Request] = {}
        self._missed: list[tuple[Any, int]] = []
        self._names = itertools.count()
        # One thread for all that touches the engine: weights change between two steps by themselves.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        self._driver: asyncio.Task[None] | None = None
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
        await self._on_worker(lambda: self._load(weights, version))
        if self._score is not None:
            await self._check_probes(weights, version)

    async def close(self) -> None:
        """Running completions return what they have, with the finish reason ABORT."""
        self._closed = True
        if self._driver is not None:
            await self._driver
        await self._on_worker(self._engine.engine_core.shutdown)
        self._worker.shutdown()

    # ---- the batch

    async def _ask(self, ask: Ask) -> list[Completion]:
        self._check_open()
        draws = [Draw() for _ in range(ask.n)]
        request = Request(ask, draws, asyncio.get_running_loop().create_future(), left=ask.n)
        name = str(next(self._names))
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
        while self._requests and not self._closed:
            try:
                outputs = await self._on_worker(self._step)
            except Exception as error:
                self._fail(error)
                return
            for output in outputs:
                self._take(output)
        for name in list(self._requests):
            await self._on_worker(lambda name=name: self._engine.abort_request([name]))  # type: ignore[misc]
            self._resolve(name)

    def _add(self, name: str, ask: Ask) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        body = request_body(ask, "")
        knobs = {name: value for name, value in body.items() if name not in OF_THE_WIRE}
        params = SamplingParams(**knobs, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=body["prompt"]), params)

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
        mean, limit = sum(distances) / len(distances), TOLERANCE[_dtype(self._engine)]
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


def _start(options: ServerOptions) -> Any:
    check_installed()
    # Read when vLLM is imported: the engine in this process, and no pinning of its threads
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that we do not own
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        limits = {
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "kv_cache_memory_bytes": options.kv_cache_bytes,
            # on a CPU a prompt in pieces ends vLLM: see serve_command.CPU_ARGUMENTS
            "enable_chunked_prefill": None if torch.accelerator.is_available() else False,
        }
        arguments = EngineArgs(
            model=options.model,
            dtype=options.dtype,
            logprobs_mode=options.logprobs_mode,
            generation_config="vllm",
            enforce_eager=options.eager,
            distributed_executor_backend="uni",
            async_scheduling=False,  # a step draws what it returns, so that its version is known
            disable_log_stats=True,
            **{name: value for name, value in limits.items() if value is not None},
        )
        return LLMEngine.from_engine_args(arguments)


def _dtype(engine: Any) -> str:
    return str(engine.model_config.dtype).removeprefix("torch.")


def _finish_reason(choice: Any, draw: Draw, ask: Ask) -> FinishReason:
    """As vLLM says, with EOS and STOP told apart by what ended it."""
    if choice.finish_reason == "length":
        return FinishReason.LENGTH
    if choice.finish_reason != "stop":
        return FinishReason.ABORT
    return FinishReason.EOS if draw.token_ids[-1] in ask.eos_ids else FinishReason.STOP
