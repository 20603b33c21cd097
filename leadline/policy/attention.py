"""Attention in a row where the completions of a group share one copy of their prompt.

    row        p p p p | a a a | b b | q q q | c c ...
    positions  0 1 2 3 | 4 5 6 | 4 5 | 0 1 2 | 3 4 ...

A prompt token attends to the prompt up to itself; a completion token to its whole prompt and to its own completion up
to itself. Nothing else is computed and no [row, row] mask exists. Exact: every token gets the attention it would get
in `prompt + completion` alone, so logprobs and gradients are those of the separate sequences.

Registered with transformers' attention interface under `NAME`, it serves every model that takes its attention from
there, sliding windows, soft caps and sinks included. The work is done by `attention_flash.py` on a CPU, by
`attention_flex.py` on a CUDA device, and otherwise (another device, a soft cap on a CPU) here, completion by completion.

The layout of the row comes through a context variable, because some models drop keyword arguments on the way to their
attention, and a block that gradient checkpointing recomputes gets it again from `recomputing_contexts`. Without a layout
(the hf engine decoding with the same model) it is plain attention under the mask that transformers makes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from leadline.policy.attention_flash import flash_attention
from leadline.policy.attention_flex import RowMask, flex_row_attention
from leadline.policy.batch import Span

NAME = "leadline_shared_prefix"
SPAN_NAME = "leadline_shared_prefix_spans"
"""The same, always completion by completion."""
BLOCK = 512
"""Queries of a long completion go in blocks of so many, where scores are spelled out or masked."""


class Layout:
    """The spans of a row, and what was made of them for an accelerator."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self._mask: RowMask | None = None

    def mask(self, length: int, device: torch.device) -> RowMask:
        """Made once per row, for all layers."""
        if self._mask is None:
            self._mask = RowMask(self.spans, length, device)
        return self._mask


_layout: ContextVar[Layout | None] = ContextVar("layout", default=None)


@contextmanager
def laid_out(spans: Sequence[Span]) -> Iterator[None]:
    """Inside, a forward with this attention treats its one row as these spans."""
    with _inside(Layout(spans)):
        yield


@contextmanager
def _inside(layout: Layout) -> Iterator[None]:
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def recomputing_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch.utils.checkpoint: a block is recomputed under the layout that it was computed with.

    The backward pass runs later, and for an accelerator on another thread.
    """
    layout = _layout.get()
    return nullcontext(), nullcontext() if layout is None else _inside(layout)


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
    by_spans: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, head, row, dim], key and value [1, kv_head, row, dim] -> [1, row, head, dim]."""
    layout = _layout.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is None and softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **options)  # type: ignore[no-any-return]
    if layout is None:
        mask = (
            _causal(key.shape[2] - query.shape[2], query.shape[2], key.shape[2], None, query.device)
            if attention_mask is None
            else attention_mask
        )
        return _spelled_out(query, *_repeated(query, key, value), mask, scale, softcap, s_aux).transpose(1, 2), None
    if by_spans:
        out = span_attention(query, key, value, layout.spans, scale, sliding_window, softcap, s_aux)
    elif query.device.type == "cpu" and softcap is None and value.shape[-1] <= query.shape[-1]:
        out = flash_attention(query, key, value, layout.spans, scale, sliding_window, s_aux)
    elif query.device.type == "cuda":
        row_mask = layout.mask(query.shape[2], query.device)
        out = flex_row_attention(query, key, value, row_mask, scale, sliding_window, softcap, s_aux)
    else:
        out = span_attention(query, key, value, layout.spans, scale, sliding_window, softcap, s_aux)
    return out.transpose(1, 2), None


def span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One prompt, one completion after the other: for every device and every kind of attention, and slower for it."""
    pieces = []
    for span in spans:
        start, stop = span.prompt
        prompt_key, prompt_value = key[:, :, start:stop], value[:, :, start:stop]
        pieces.append(_attend(query[:, :, start:stop], prompt_key, prompt_value, scale, window, softcap, sinks))
        for start, stop in span.completions:
            if start == stop:
                continue
            keys = torch.cat([prompt_key, key[:, :, start:stop]], dim=2)
            values = torch.cat([prompt_value, value[:, :, start:stop]], dim=2)
            pieces.append(_attend(query[:, :, start:stop], keys, values, scale, window, softcap, sinks))
    return torch.cat(pieces, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The last `query.shape[2]` positions of a sequence attending to all of it, causally.

    Blocks of queries are recomputed in the backward pass: neither masks nor scores of a whole sequence are kept.
    """
    queries, keys = query.shape[2], key.shape[2]
    if softcap is None and sinks is None and queries == keys and (window is None or window >= keys):
        key, value = _repeated(query, key, value)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    blocks = []
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        last = keys - queries + stop
        first = 0 if window is None else max(0, keys - queries + start - window + 1)
        seen = (query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last])
        offset = keys - queries + start - first
        blocks.append(checkpoint(_block, *seen, offset, scale, window, softcap, sinks, use_reentrant=False))
    return torch.cat(blocks, dim=2)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Queries of which the first stands at the key number `offset`."""
    key, value = _repeated(query, key, value)
    mask = _causal(offset, query.shape[2], key.shape[2], window, query.device)
    if softcap is not None or sinks is not None:
        return _spelled_out(query, key, value, mask, scale, softcap, sinks)
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


def _causal(offset: int, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]: True where the key is at or before the query, and inside the window."""
    last = torch.arange(offset, offset + queries, device=device)[:, None]
    place = torch.arange(keys, device=device)[None]
    seen = place <= last
    return seen if window is None else seen & (place > last - window)


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask where the layout says it all."""
    return None if _layout.get() is not None else sdpa_mask(*args, **options)


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionInterface.register(SPAN_NAME, partial(shared_prefix_attention, by_spans=True))
AttentionMaskInterface.register(NAME, _mask)
AttentionMaskInterface.register(SPAN_NAME, _mask)
