"""Shared-prompt attention on a CPU: flash attention of parts of the row, merged by their log-sum-exps.

    row      p p p p | a a a | b b          parts    p x p          causal
                                                     a b x p        whole: one call, the prompt's keys are not copied
                                                     a x a, b x b   causal

Each part gives an output o and the log-sum-exp l of its scores. With L = log sum_parts e^l the row's attention is
sum_parts e^(l - L) o. Its gradient is exact too: flash attention's backward pass needs of the softmax only L, and of the
other keys only rowsum(dO * O), so each part's own backward, given the merged O and L, adds its own keys' share. No mask of
more than a block of a sliding window exists, and nothing but the inputs, O and L is kept.

A sink (gpt-oss) is one more logit per head that has no value: one more term in L.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leadline.policy.batch import Span

BLOCK = 512
"""Queries of a sequence longer than its sliding window go in blocks of so many."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """Queries that attend to keys: (start, stop) of each along the row."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    """Query i sees the keys up to the i-th."""
    first_seen: int | None = None
    """The window: query i sees from key `first_seen` + i on, both counted from their starts. None = from the first."""
    last_seen: int | None = None
    """... and up to key `last_seen` + i. None = to the last."""


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [1, head, row, dim], key [1, kv_head, row, dim], value [1, kv_head, row, v_dim <= dim] -> [1, head, row, v_dim]."""
    narrow = query.shape[-1] - value.shape[-1]
    if narrow:
        value = torch.nn.functional.pad(value, (0, narrow))
    key, value = key.to(query.dtype), value.to(query.dtype)
    parts = list(row_parts(spans, window))
    out: Tensor = _Flash.apply(query, key, value, sinks, parts, scale)  # type: ignore[no-untyped-call]
    return out[..., : out.shape[-1] - narrow]


def row_parts(spans: Sequence[Span], window: int | None) -> Iterator[Part]:
    """The parts of a row: together they hold each pair of a token and one that it attends to once."""
    for span in spans:
        start, stop = span.prompt
        yield from _sequence(start, stop, window)
        length = stop - start
        completions = [(a, b) for a, b in span.completions if b > a]
        if not completions:
            continue
        if window is None or length + max(b - a for a, b in completions) <= window:
            yield Part((completions[0][0], completions[-1][1]), span.prompt)
        else:
            for first, last in completions:
                yield from _prompt_through_window(first, last, start, stop, window)
        for first, last in completions:
            yield from _sequence(first, last, window)


def _sequence(start: int, stop: int, window: int | None) -> Iterator[Part]:
    """Tokens attending to themselves and what came before."""
    if window is None or stop - start <= window:
        yield Part((start, stop), (start, stop), causal=True)
        return
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        oldest = max(start, first - window + 1)
        yield Part((first, last), (oldest, last), first_seen=first - window + 1 - oldest, last_seen=first - oldest)


def _prompt_through_window(first: int, last: int, start: int, stop: int, window: int) -> Iterator[Part]:
    """A completion attending to the end of its prompt; after `window` - 1 tokens it sees nothing of it."""
    end = min(last, first + window - 1)
    for a in range(first, end, BLOCK):
        b = min(a + BLOCK, end)
        seen_from = stop + (a - first) - window + 1
        oldest = max(start, seen_from)
        yield Part((a, b), (oldest, stop), first_seen=seen_from - oldest)


class _Flash(torch.autograd.Function):
    """See the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, parts: list[Part], scale: float
    ) -> Tensor:
        out = query.new_zeros(query.shape, dtype=torch.float32)
        total = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        heads = _Heads(query, key)
        for part in parts:
            found, log_sum = _flash(
                *heads.inputs(query, key, value, part), 0.0, part.causal, attn_mask=_mask(part, query), scale=scale
            )
            _merge(heads.queries(out, part), heads.queries(total, part), found, log_sum)
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.float()[None, :, None])
            out *= (total - with_sink).exp()[..., None]
            total = with_sink
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total = ctx.saved_tensors
        by_query, by_key, by_value = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
        heads = _Heads(query, key)
        for part in ctx.parts:
            queries, keys, values = heads.inputs(query, key, value, part)
            at_queries = (heads.queries(x, part) for x in (out, total))
            found = _flash_backward(
                heads.queries(by_out, part),
                queries,
                keys,
                values,
                *at_queries,
                0.0,
                part.causal,
                attn_mask=_mask(part, query),
                scale=ctx.scale,
            )
            heads.queries(by_query, part).add_(found[0])
            for gradient, addition in zip((by_key, by_value), found[1:], strict=True):
                gradient[0, :, slice(*part.keys)] += addition.sum(1)
        by_sinks = None
        if sinks is not None:
            share = (sinks.float()[None, :, None] - total).exp()
            by_sinks = -(share * (by_out * out).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks.dtype)
        gradients = (by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype))
        return *gradients, by_sinks, None, None


class _Heads:
    """Grouped-query attention without copies: key heads as the batch, the query heads of each as its heads."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self._keys = key.shape[1]
        self._each = query.shape[1] // key.shape[1]

    def queries(self, tensor: Tensor, part: Part) -> Tensor:
        """A view of [1, head, row, ...]: [kv_head, heads of each, queries, ...]."""
        by_key: Tensor = tensor[0].unflatten(0, (self._keys, self._each))
        return by_key[:, :, slice(*part.queries)]

    def inputs(self, query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (x[0][:, None, slice(*part.keys)].expand(-1, self._each, -1, -1) for x in (key, value))
        return self.queries(query, part), keys, values


def _merge(out: Tensor, total: Tensor, found: Tensor, log_sum: Tensor) -> None:
    """Into out and total, in place."""
    merged = torch.logaddexp(total, log_sum)
    out.mul_((total - merged).exp()[..., None]).add_(found * (log_sum - merged).exp()[..., None])
    total.copy_(merged)


def _mask(part: Part, like: Tensor) -> Tensor | None:
    """[query, key], to be added to the scores."""
    if part.first_seen is None and part.last_seen is None:
        return None
    queries, keys = (stop - start for start, stop in (part.queries, part.keys))
    place = torch.arange(keys, device=like.device)[None] - torch.arange(queries, device=like.device)[:, None]
    unseen = torch.zeros_like(place, dtype=torch.bool)
    if part.first_seen is not None:
        unseen |= place < part.first_seen
    if part.last_seen is not None:
        unseen |= place > part.last_seen
    return like.new_zeros(queries, keys).masked_fill_(unseen, -torch.inf)
