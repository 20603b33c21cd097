"""The decode loop of the hf engine: which completions run, one token for each of them at a time, and when they end."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leadline.engines.hf_attention import OneTokenAttention
from leadline.engines.hf_cache import RowCache
from leadline.engines.hf_forward import Forward
from leadline.engines.hf_packed import PackedLinears
from leadline.engines.hf_prompts import Group, PromptCache
from leadline.errors import EngineError
from leadline.objective.drawing import draw_scored
from leadline.objective.logprobs import token_logprobs
from leadline.objective.sampling import processed_logits
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt


@dataclass(eq=False)
class Request:
    """One call of `generate`."""

    prompt: Prompt
    n: int
    sampling: Sampling
    future: asyncio.Future[list[Completion]]
    started: int = 0
    """How many of the n completions have been prefilled."""
    done: dict[int, Completion] = field(default_factory=dict)
    """By sample index."""


@dataclass(eq=False)
class Row:
    """One completion in flight."""

    request: Request
    sample: int
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    """One number in [0, 1) per token to draw: they depend on nothing but seed, prompt and sample index."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def finish(self, reason: FinishReason) -> None:
        completion = Completion(tuple(self.token_ids), tuple(self.logprobs), tuple(self.versions), reason)
        self.request.done[self.sample] = completion


class Decoder:
    """Everything that happens on the engine's worker thread. Rows of the model's batch and of `rows` agree."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any,
        eos_ids: frozenset[int],
        seed: int,
        max_batch: int,
        shared: bool,
    ) -> None:
        """`shared`: the weights belong to another, who may change them whenever nothing is decoded."""
        self.model = model
        self.version = 0
        self.weights_are_new = True
        """To be set when the weights have changed."""
        self.waiting: deque[Request] = deque()
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._seed = seed
        self._max_batch = max_batch
        self._forward = Forward(model)
        self._packed = PackedLinears(model)
        self._attention = OneTokenAttention(model)
        self._shared = shared
        self._rows: list[Row] = []
        self._cache = RowCache()

    @property
    def context_length(self) -> int | None:
        return self._forward.context_length

    @property
    def busy(self) -> bool:
        return bool(self._rows or self.waiting)

    def advance(self) -> list[Request]:
        """Prefill what may start, else draw one token for every row. The requests that are complete now."""
        if self.weights_are_new:
            self._packed.refresh()
            self.weights_are_new = False
        with torch.inference_mode(), _evaluating(self.model), self._packed.active(), self._attention.active():
            self._drop_cancelled()
            admitted = self._admissible()
            rows = self._prefill(admitted) if admitted else self._decode()
        requests = dict.fromkeys(row.request for row in rows)
        return [request for request in requests if len(request.done) == request.n]

    def abort(self) -> list[Request]:
        """Every request that is not complete, completed with the finish reason ABORT."""
        for row in self._rows:
            row.finish(FinishReason.ABORT)
        requests = [*dict.fromkeys(row.request for row in self._rows), *self.waiting]
        for request in dict.fromkeys(requests):
            for sample in set(range(request.n)) - request.done.keys():
                request.done[sample] = Completion((), (), (), FinishReason.ABORT)
        self._rows, self._cache = [], RowCache()
        self.waiting.clear()
        return list(dict.fromkeys(requests))

    # Which completions run -------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for request in list(self.waiting):  # a copy: the event loop may append meanwhile
            if request.future.cancelled():
                self.waiting.remove(request)
        self._remove([i for i, row in enumerate(self._rows) if row.request.future.cancelled()])

    def _admissible(self) -> list[tuple[Request, int]]:
        """Requests that start now, in order of arrival, and how many of their completions.

        A request starts whole, for each start costs a prefill, unless it is larger than an empty batch. One that is
        drawn from another distribution than the running ones waits until these are done.
        """
        admitted: list[tuple[Request, int]] = []
        free = self._max_batch - len(self._rows)
        distributions = {_distribution(row.request.sampling) for row in self._rows[:1]}
        while self.waiting:
            request = self.waiting[0]
            left = request.n - request.started
            fits = left <= free or free == self._max_batch
            if not fits or not distributions <= {_distribution(request.sampling)}:
                break
            n = min(left, free)
            admitted.append((request, n))
            free -= n
            distributions.add(_distribution(request.sampling))
            if n < left:
                break
            self.waiting.popleft()
        return admitted

    def _new_rows(self, request: Request, n: int) -> list[Row]:
        index = request.prompt.index
        samples = range(request.started, request.started + n)
        request.started += n
        keys = ([self._seed, 2 * abs(index) + (index < 0), sample] for sample in samples)
        streams = (np.random.default_rng(key).random(request.sampling.max_tokens) for key in keys)
        return [Row(request, sample, stream) for sample, stream in zip(samples, streams, strict=True)]

    def _new_group(self, cache: PromptCache, length: int, n: int) -> Group:
        shared = n > 1 and self._forward.can_share(cache)
        return Group(n, 0, length, cache.layers) if shared else Group(n, length)

    # One token -------------------------------------------------------------------------------------------------------

    def _prefill(self, admitted: Sequence[tuple[Request, int]]) -> list[Row]:
        """Each prompt is forwarded once, alone and unpadded; its completions share its cache, or start from copies."""
        rows: list[Row] = []
        prefilled, logits = [], []
        for request, n in admitted:
            ids, cache = request.prompt.token_ids, PromptCache()
            logits.append(self._forward([ids], [list(range(len(ids)))], None, cache).expand(n, -1))
            prefilled.append((cache, self._new_group(cache, len(ids), n)))
            rows += self._new_rows(request, n)
        self._cache.admit(prefilled, max(request.sampling.max_tokens for request, _ in admitted))
        self._rows += rows
        self._draw(rows, torch.cat(logits))
        return rows

    def _decode(self) -> list[Row]:
        rows = list(self._rows)
        if rows:
            positions = [[length] for length in self._cache.lengths]
            mask = self._cache.extend()
            logits = self._forward([row.token_ids[-1:] for row in rows], positions, mask, self._cache.cache)
            self._check_prompts_read()
            self._draw(rows, logits)
        return rows

    def _check_prompts_read(self) -> None:
        if not self._cache.prompts_read():
            raise EngineError(
                f"engine.kind is 'hf', but {type(self.model).__name__} attends to a new token in another way than to its "
                "prompt. The completions would not see their prompts. Set engine.kind = 'vllm'."
            )

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> None:
        """The next token of each row, with its logprob and version; rows that end with it leave the batch."""
        ids, logprobs = self._sample(rows, logits)
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
        ended = set()
        for row in rows:
            if (reason := self._finish_reason(row)) is not None:
                row.finish(reason)
                ended.add(row)
        self._remove([i for i, row in enumerate(self._rows) if row in ended])

    def _sample(self, rows: Sequence[Row], logits: Tensor) -> tuple[list[int], list[float]]:
        sampling = rows[0].request.sampling
        if not bool(logits.amax(-1).isfinite().all()):  # amax is NaN where any logit is
            raise EngineError(
                f"The policy's logits are not finite (weights of version {self.version}), but a token can only be "
                "drawn from finite ones. Every completion would be noise. Look for NaN in the weights: lower "
                "optimizer.learning_rate, or go back to a checkpoint."
            )
        logits = processed_logits(
            logits,
            temperature=sampling.temperature or 1.0,  # greedy: the logprob is the one at temperature 1
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seen=None if sampling.repetition_penalty == 1 else _seen(rows, logits),
        )
        if sampling.temperature == 0:
            ids = logits.argmax(-1)
            return ids.tolist(), token_logprobs(logits, ids).tolist()
        uniforms = [row.uniforms[len(row.token_ids)] for row in rows]
        ids, logprobs = draw_scored(logits, torch.tensor(uniforms, dtype=torch.float32, device=logits.device))
        return ids.tolist(), logprobs.tolist()

    def _remove(self, places: Sequence[int]) -> None:
        """Rows leave the batch; others move into their places."""
        for i in reversed(places):
            for source, target in self._cache.remove(i):
                self._rows[target] = self._rows[source]
            self._rows.pop()
        if places and not self._rows:
            self._cache = RowCache()
            self.weights_are_new |= self._shared

    # When completions end --------------------------------------------------------------------------------------------

    def _finish_reason(self, row: Row) -> FinishReason | None:
        """EOS before stop before length: a completion that ends at the limit by itself was not truncated."""
        sampling, token = row.request.sampling, row.token_ids[-1]
        if token in self._eos_ids:
            return FinishReason.EOS
        if token in sampling.stop_token_ids or (sampling.stop and self._stops(row)):
            return FinishReason.STOP
        total = len(row.request.prompt.token_ids) + len(row.token_ids)
        if len(row.token_ids) == sampling.max_tokens or total == self._forward.context_length:
            return FinishReason.LENGTH
        return None

    def _stops(self, row: Row) -> bool:
        """Whether the last token completed a stop string, which may span tokens or end inside one."""
        stops = row.request.sampling.stop
        # A token may be a single byte of the string. Four more: the first decoded tokens may be parts of a character.
        longest = max(len(stop.encode()) for stop in stops) + 4
        tail = self._tokenizer.decode(
            row.token_ids[-longest:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in tail for stop in stops)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode from before: the policy's own modules may be training."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def _distribution(sampling: Sampling) -> tuple[float, ...]:
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)


def _seen(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """[row, vocab]: the token is in the row's prompt or completion."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, [*row.request.prompt.token_ids, *row.token_ids]] = True
    return seen
