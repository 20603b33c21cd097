"""The engine that samples in this process, from the policy's own weights or from a copy of them."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from leadline import compute
from leadline.engines.hf_decode import Decoder, Request
from leadline.errors import EngineError
from leadline.models import is_lora
from leadline.settings.rollout import Sampling
from leadline.settings.section import Dtype
from leadline.types import Completion, Prompt, Weights

T = TypeVar("T")


class HFEngine:
    """Completions of a Hugging Face model, decoded together on one thread of this process (`leadline.compute`).

    Calls of `generate` made in the same turn of the event loop start together, in their order; later ones join as soon
    as they fit into `max_batch`. The draws of a completion depend on `seed`, `prompt.index` and its place in the group,
    not on what else is in the batch (up to rounding of the logits). With temperature 0 the most probable token is
    taken, and its logprob is that at temperature 1.

    A model shared with the trainer (no copy) must not change while completions run. A copy may: new weights come in
    between two tokens, and completions in flight go on with the keys and values they have. Their logprobs are those of
    the distribution that was really sampled, so importance weights stay exact. With `own_copy` there is always one, and it
    is decoded on a thread of its own: the policy may train meanwhile.

    Raises EngineError for a model that keeps more than keys and values (Mamba and the like).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any,
        eos_ids: frozenset[int],
        seed: int = 0,
        max_batch: int = 128,
        dtype: Dtype | None = None,
        own_copy: bool = False,
    ) -> None:
        _check_cacheable(model)
        wanted = next(model.parameters()).dtype if dtype is None else getattr(torch, dtype)
        self._copies = own_copy or wanted != next(model.parameters()).dtype
        sampled = _plain_copy(model, wanted) if self._copies else model
        self._decoder = Decoder(
            sampled, tokenizer=tokenizer, eos_ids=eos_ids, seed=seed, max_batch=max_batch, shared=not self._copies
        )
        # One thread for all that touches the weights and the batch: new weights fall between two tokens by themselves.
        self._own_thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine") if own_copy else None
        self._worker = self._own_thread or compute.THREAD
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions of the prompt, in the order of their draws.

        Raises EngineError: the engine is closed, the prompt is empty or fills the context, logits are not finite.
        """
        self._check(prompt)
        request = Request(prompt, n, sampling, asyncio.get_running_loop().create_future())
        self._decoder.waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await request.future

    async def load_weights(self, weights: Weights, version: int) -> None:
        """The copy holds `weights`, and tokens drawn from now on carry `version`; without a copy, only the latter.

        Raises EngineError if names or shapes are not those of the model; nothing is changed then.
        """
        self._check_open()
        await self._on_worker(lambda: self._load(weights, version))

    async def close(self) -> None:
        """Running completions return what they have, with the finish reason ABORT."""
        self._closed = True
        if self._driver is not None:
            await self._driver
        if self._own_thread is not None:
            self._own_thread.shutdown()

    async def _drive(self) -> None:
        """Advance the batch until nothing is left to do."""
        decoder = self._decoder
        while decoder.busy and not self._closed:
            try:
                complete = await self._on_worker(decoder.advance)
            except Exception as error:
                for request in decoder.abort():
                    if not request.future.done():
                        request.future.set_exception(error)
                return
            _resolve(complete)
        _resolve(decoder.abort())

    async def _on_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _load(self, weights: Weights, version: int) -> None:
        if self._copies:
            own = self._decoder.model.state_dict()
            _check_same(weights, own)
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(weights[name])
        self._decoder.version = version
        self._decoder.weights_are_new = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("The hf engine is closed, but it was asked for more. Nothing can run. Make a new engine.")

    def _check(self, prompt: Prompt) -> None:
        self._check_open()
        length, limit = len(prompt.token_ids), self._decoder.context_length
        if length == 0:
            raise EngineError(
                f"Prompt {prompt.index} has no tokens, but the first token is drawn from what follows the last one. "
                "Nothing can be sampled. Begin the prompt with the BOS token, or drop the row."
            )
        if limit is not None and length >= limit:
            raise EngineError(
                f"Prompt {prompt.index} has {length} tokens, but the model's context holds {limit}. No completion would "
                "fit. Lower data.max_prompt_tokens, or drop the row."
            )


def _resolve(requests: list[Request]) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_result([request.done[sample] for sample in range(request.n)])


def _plain_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A frozen copy in evaluation mode; a LoRA adapter is merged into it, so that names are the plain ones."""
    plain: Any = copy.deepcopy(model)
    if is_lora(plain):
        plain = plain.merge_and_unload()
    for parameter in plain.parameters():
        # Only parameters: a rotary buffer in bfloat16 would put tokens at the wrong positions.
        parameter.requires_grad_(False).grad = None
        parameter.data = parameter.data.to(dtype)
    frozen: nn.Module = plain.eval()
    return frozen


def _check_cacheable(model: Any) -> None:
    layers = DynamicCache(config=model.config).layers
    others = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if others:
        raise EngineError(
            f"engine.kind is 'hf', but {type(model).__name__} keeps a state of another kind than keys and values "
            f"({', '.join(sorted(others))}). Its completions could not be batched rightly. Set engine.kind = 'vllm'."
        )


def _check_same(weights: Weights, own: Weights) -> None:
    unknown, missing = sorted(weights.keys() - own.keys()), sorted(own.keys() - weights.keys())
    if unknown or missing:
        raise EngineError(
            f"The weights to load have the names {unknown[:3]} that the engine's model lacks, and lack {missing[:3]}. "
            "Part of the model would stay old. Load the state_dict of the same model, LoRA merged."
        )
    for name, tensor in own.items():
        if weights[name].shape != tensor.shape:
            raise EngineError(
                f"The weight {name!r} has the shape {tuple(weights[name].shape)}, but the engine's model has "
                f"{tuple(tensor.shape)}. It cannot be loaded. Load the state_dict of the same model."
            )
