"""Attention in a row where the completions of a group share one copy of their prompt.

    row        p p p p | a a a | b b | q q q | c c ...
    positions  0 1 2 3 | 4 5 6 | 4 5 | 0 1 2 | 3 4 ...

A prompt token attends to the prompt up to itself; a completion token to its whole prompt and to its own completion up
to itself. Nothing else is computed and no [row, row] mask exists. Exact: every token gets the attention it would get
in `prompt + completion` alone, so logprobs and gradients are those of the separate sequences.

Registered with transformers' attention interface under `NAME`, it serves every model that takes its attention from
there, sliding windows, soft caps and sinks included. The layout of the row comes through a context variable, because
some models drop keyword arguments on the way to their attention, and a block that gradient checkpointing recomputes gets it
again from `recomputing_contexts`. Without a layout (the hf engine decoding with the same model) it is plain attention under
the mask that transformers makes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from leadline.batch import Span

NAME = "leadline_shared_prefix"

_layout: ContextVar[Sequence[Span] | None] = ContextVar("layout", default=None)


@contextmanager
def laid_out(spans: Sequence[Span]) -> Iterator[None]:
    """Inside, a forward with this attention treats its one row as these spans."""
    token = _layout.set(spans)
    try:
        yield
    finally:
        _layout.reset(token)


def recomputing_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch.utils.checkpoint: a block is recomputed under the layout that it was computed with.

    The backward pass runs later, and for an accelerator on another thread.
    """
    spans = _layout.get()
    return nullcontext(), nullcontext() if spans is None else laid_out(spans)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, head, row, dim], key and value [1, kv_head, row, dim] -> [1, row, head, dim]."""
    spans = _layout.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if spans is None and softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **options)  # type: ignore[no-any-return]
    if spans is None:
        mask = _causal(query.shape[2], key.shape[2], None, query.device) if attention_mask is None else attention_mask
        return _spelled_out(query, *_repeated(query, key, value), mask, scale, softcap, s_aux).transpose(1, 2), None
    pieces = []
    for span in spans:
        start, stop = span.prompt
        prompt_key, prompt_value = key[:, :, start:stop], value[:, :, start:stop]
        pieces.append(_attend(query[:, :, start:stop], prompt_key, prompt_value, scale, sliding_window, softcap, s_aux))
        for start, stop in span.completions:
            if start == stop:
                continue
            keys = torch.cat([prompt_key, key[:, :, start:stop]], dim=2)
            values = torch.cat([prompt_value, value[:, :, start:stop]], dim=2)
            pieces.append(_attend(query[:, :, start:stop], keys, values, scale, sliding_window, softcap, s_aux))
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The last `query.shape[2]` positions of a sequence attending to all of it, causally."""
    key, value = _repeated(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    if softcap is not None or sinks is not None:
        return _spelled_out(query, key, value, _causal(queries, keys, window, query.device), scale, softcap, sinks)
    if queries == keys and (window is None or window >= keys):
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    mask = _causal(queries, keys, window, query.device)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(softcap tanh(q k / softcap)) v, a sink being a logit per head that takes probability and gives no value."""
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # a padded query sees nothing, and is no NaN
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for each query head (grouped-query attention), in the queries' dtype."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.to(query.dtype).repeat_interleave(repeats, dim=1) for x in (key, value))
    return key, value


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]: True where the key is at or before the query, and inside the window."""
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    place = torch.arange(keys, device=device)[None]
    seen = place <= last
    return seen if window is None else seen & (place > last - window)


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask where the layout says it all."""
    return None if _layout.get() is not None else sdpa_mask(*args, **options)


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, _mask)
