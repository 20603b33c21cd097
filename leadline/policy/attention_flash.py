"""Shared-prompt attention on a CPU: flash attention of parts of the row, merged by their log-sum-exps.

    row      p p p p | a a a | b b          parts    p x p          causal
                                                     a b x p        whole: one call, the prompt's keys are not copied
                                                     a x a, b x b   causal

Each part gives an output o and the log-sum-exp l of its scores. With L = log sum_parts e^l the row's attention is
sum_parts e^(l - L) o. Its gradient is exact too: flash attention's backward pass needs of the softmax only L, and of the
other keys only rowsum(dO * O), so each part's own backward, given the merged O and L, adds its own keys' share. No mask of
more than a block of a sliding window exists, and nothing but the inputs, O and L is kept.

A sink (gpt-oss) is one more logit per head that has no value: one more term in L.

A call costs more than the work of a short part, and leaves a second thread idle. So short causal parts of similar lengths
share a call, gathered from the row and padded (`_Together`); any other part is a call on views of the row (`_Alone`). Each
token has one part in which it sees its own sequence; these come first, and find nothing to be merged with.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leadline.policy.batch import Span

BLOCK = 512
"""Queries of a sequence longer than its sliding window go in blocks of so many."""
SHORT = 128
"""Causal parts of up to so many tokens share calls: longer ones keep a call busy."""
PADDING = 4
"""A part is padded by so many tokens at most; whatever is longer begins a new call."""
SMALL = 2**16
"""Parts of up to so many pairs are computed in float32: in bfloat16 small products take up to seven times as long."""

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

    @property
    def length(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def own(self) -> bool:
        """The keys are of the queries' own sequence: true of one of the parts of each token."""
        return self.queries[1] == self.keys[1]


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
    query, key, value = (_by_token(x.to(query.dtype)) for x in (query, key, value))
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
        out, total = (_zeros(shape, query.device) for shape in (query.shape, query.shape[:3]))
        calls = list(_calls(parts, query, key))
        for call in calls:
            inputs = (call.queries(query), call.keys(key), call.keys(value))
            found, log_sum = _flash(*inputs, 0.0, call.causal, attn_mask=call.mask(inputs[0]), scale=scale)
            call.merge(out, total, found, log_sum)
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.float()[None, :, None])
            out *= (total - with_sink).exp()[..., None]
            total = with_sink
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total = ctx.saved_tensors
        by_out = _by_token(by_out)
        by_query, by_key, by_value = (_zeros(x.shape, x.device) for x in (query, key, value))
        for call in ctx.calls:
            inputs = (call.queries(query), call.keys(key), call.keys(value))
            at_queries = (call.queries(out), call.log_sums(total))
            mask = call.mask(inputs[0])
            found = _flash_backward(
                call.queries(by_out), *inputs, *at_queries, 0.0, call.causal, attn_mask=mask, scale=ctx.scale
            )
            call.add_to_queries(by_query, found[0])
            call.add_to_keys(by_key, found[1])
            call.add_to_keys(by_value, found[2])
        by_sinks = None
        if sinks is not None:
            share = (sinks.float()[None, :, None] - total).exp()
            by_sinks = -(share * (by_out * out).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks.dtype)
        gradients = (by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype))
        return *gradients, by_sinks, None, None


def _by_token(row: Tensor) -> Tensor:
    """[1, head, row, ...], token after token in memory, as most models' tensors are already: `_Together` needs views."""
    return row.transpose(1, 2).contiguous().transpose(1, 2)


def _zeros(shape: Sequence[int], device: torch.device) -> Tensor:
    """[1, head, row, ...] of float32 zeros, laid out like that."""
    one, heads, row, *width = shape
    return torch.zeros(one, row, heads, *width, device=device).transpose(1, 2)


def _calls(parts: Sequence[Part], query: Tensor, key: Tensor) -> Iterator["_Alone | _Together"]:
    """Own parts first."""
    short = sorted((part for part in parts if part.causal and part.length <= SHORT), key=lambda part: part.length)
    alone = [part for part in parts if not (part.causal and part.length <= SHORT)]
    for batch in _batches(short):
        if len(batch) > 1:
            yield _Together(batch, query, key)
        else:
            alone += batch
    for part in sorted(alone, key=lambda part: not part.own):
        yield _Alone(part, query, key)


def _batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The parts, which are sorted by length, in runs of lengths that differ by PADDING at most."""
    batch: list[Part] = []
    for part in parts:
        if batch and part.length > batch[0].length + PADDING:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


class _Alone:
    """One part, by views: key heads as the batch, the query heads of each as its heads."""

    def __init__(self, part: Part, query: Tensor, key: Tensor) -> None:
        self.causal = part.causal
        self._part = part
        self._heads = (key.shape[1], query.shape[1] // key.shape[1])
        small = part.length * (part.keys[1] - part.keys[0]) <= SMALL
        self._dtype = torch.float32 if small else query.dtype

    def queries(self, row: Tensor) -> Tensor:
        """[1, head, row, dim] -> [kv_head, heads of each, queries, dim]."""
        return self._view(row).to(self._dtype)

    def keys(self, row: Tensor) -> Tensor:
        """[1, kv_head, row, dim] -> [kv_head, heads of each, keys, dim]."""
        return row[0][:, None, slice(*self._part.keys)].to(self._dtype).expand(-1, self._heads[1], -1, -1)

    def log_sums(self, total: Tensor) -> Tensor:
        return self._view(total)

    def mask(self, like: Tensor) -> Tensor | None:
        return _mask(self._part, like)

    def merge(self, out: Tensor, total: Tensor, found: Tensor, log_sum: Tensor) -> None:
        """Into out and total, in place."""
        out, total = self._view(out), self._view(total)
        if self._part.own:
            out.copy_(found)
            total.copy_(log_sum)
            return
        merged = torch.logaddexp(total, log_sum)
        out.mul_((total - merged).exp()[..., None]).add_(found * (log_sum - merged).exp()[..., None])
        total.copy_(merged)

    def add_to_queries(self, row: Tensor, found: Tensor) -> None:
        self._view(row).add_(found)

    def add_to_keys(self, row: Tensor, found: Tensor) -> None:
        row[0, :, slice(*self._part.keys)] += found.sum(1)

    def _view(self, row: Tensor) -> Tensor:
        by_key: Tensor = row[0].unflatten(0, self._heads)
        return by_key[:, :, slice(*self._part.queries)]


class _Together:
    """Short causal parts in one call: key heads, part by part, as the batch, the query heads of each as more queries.

    Padding repeats the last token of its own part, so that a NaN stays where it is. No other token sees it, what it finds
    is left out, and an infinite L makes its share of every gradient 0.
    """

    causal = False
    """A mask instead: of each token the queries of several heads follow each other."""

    def __init__(self, parts: Sequence[Part], query: Tensor, key: Tensor) -> None:
        self._kv_heads = key.shape[1]
        self._each = query.shape[1] // self._kv_heads
        self._longest = max(part.length for part in parts)
        start, stop = torch.tensor([part.queries for part in parts], device=query.device).T[:, :, None, None]
        token = start + torch.arange(self._longest, device=query.device)
        lines = token.minimum(stop - 1) * self._kv_heads + torch.arange(self._kv_heads, device=query.device)[:, None]
        self._lines = lines.flatten()
        """Of `_table`: [part * kv_head * longest]."""
        self._padding = (token >= stop).expand_as(lines).flatten()
        self._real = (~self._padding).nonzero()[:, 0]
        self._real_lines = self._lines[self._real]

    def queries(self, row: Tensor) -> Tensor:
        """[1, head, row, dim] -> [part * kv_head, 1, longest * heads of each, dim]."""
        return self._gather(row).view(-1, 1, self._longest * self._each, row.shape[3]).float()

    def keys(self, row: Tensor) -> Tensor:
        """[1, kv_head, row, dim] -> [part * kv_head, 1, longest, dim]."""
        return self._gather(row).view(-1, 1, self._longest, row.shape[3]).float()

    def log_sums(self, total: Tensor) -> Tensor:
        lines = self._gather(total).masked_fill_(self._padding[:, None], torch.inf)
        return lines.view(-1, 1, self._longest * self._each)

    def mask(self, like: Tensor) -> Tensor:
        one_head = like.new_full((self._longest, self._longest), -torch.inf).triu(1)
        return one_head.repeat_interleave(self._each, 0)

    def merge(self, out: Tensor, total: Tensor, found: Tensor, log_sum: Tensor) -> None:
        """Into out and total, in place: both are 0 there."""
        self.add_to_queries(out, found)
        self.add_to_queries(total, log_sum)

    def add_to_queries(self, row: Tensor, found: Tensor) -> None:
        lines = found.reshape(len(self._lines), -1).index_select(0, self._real)
        self._table(row).index_add_(0, self._real_lines, lines)

    add_to_keys = add_to_queries

    def _gather(self, row: Tensor) -> Tensor:
        return self._table(row).index_select(0, self._lines)

    def _table(self, row: Tensor) -> Tensor:
        """[row * kv_head, ...], a view: a line is what one token has for one key head."""
        return row[0].transpose(0, 1).view(row.shape[2] * self._kv_heads, -1)


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
