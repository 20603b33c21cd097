import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.policy import attention, attention_flash
from leadline.policy.attention import span_attention
from leadline.policy.attention_flash import flash_attention, row_parts
from leadline.policy.batch import Span

SPANS = (Span((0, 9), ((9, 15), (15, 15), (15, 26))), Span((26, 30), ()), Span((30, 33), ((33, 41),)))
"""Two completions and an empty one, a prompt alone, a prompt shorter than its completion."""
LENGTH = 41


def span_of(prompt: int, lengths: Sequence[int], start: int = 0) -> Span:
    """A prompt and completions of so many tokens, from a place of the row on."""
    edges = list(accumulate((prompt, *lengths), initial=start))
    return Span((start, edges[1]), tuple(pairwise(edges[1:])))


def length_of(spans: Sequence[Span]) -> int:
    return max(stop for span in spans for _, stop in (span.prompt, *span.completions))


def many() -> tuple[Span, ...]:
    """Two groups of 16 completions of 10 to 20 tokens, and a third of lengths from nothing to 40."""
    first, second = (random.Random(seed).choices(range(10, 21), k=16) for seed in (1, 2))
    spans = [span_of(30, first)]
    spans.append(span_of(12, second, length_of(spans)))
    return (*spans, span_of(1, [1, 0, 1, 2, 40, 5, 0, 36, 17], length_of(spans)))


def draw(heads: int, width: int, seed: int, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    made = torch.randn(1, heads, length, width, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).requires_grad_()


def inputs(value_width: int = 16, length: int = LENGTH) -> list[Tensor]:
    """Query, key, value of four heads, two of them to each key, and a sink for each."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    shapes = ((4, 16), (2, 16), (2, value_width))
    return [*(draw(*shape, seed, length=length) for seed, shape in enumerate(shapes, 1)), sinks]


def visible(window: int | None, spans: Sequence[Span] = SPANS) -> Tensor:
    """[query, key], by the definition."""
    length = length_of(spans)
    group, completion, position = (torch.full((length,), -1) for _ in range(3))
    count = 0
    for number, span in enumerate(spans):
        for place in range(*span.prompt):
            group[place], position[place] = number, place - span.prompt[0]
        for first, last in span.completions:
            count += 1
            for place in range(first, last):
                group[place], completion[place] = number, count
                position[place] = place - first + span.prompt[1] - span.prompt[0]
    own = (completion[None] == -1) | (completion[None] == completion[:, None])
    seen = (group[None] == group[:, None]) & own & (torch.arange(length)[None] <= torch.arange(length)[:, None])
    return seen if window is None else seen & (position[:, None] - position[None] < window)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    window: int | None,
    spans: Sequence[Span] = SPANS,
) -> Tensor:
    length = length_of(spans)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores.masked_fill(~visible(window, spans), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, length, 1)], -1)
    return scores.softmax(-1)[..., :length] @ value.repeat_interleave(2, 1)


def with_gradients(attend: Callable[..., Tensor], tensors: list[Tensor], sinks: bool) -> list[Tensor]:
    used = tensors if sinks else tensors[:3]
    out = attend(*tensors[:3], tensors[3] if sinks else None)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), used)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 7, 12, 100])
@pytest.mark.parametrize("block", [3, 512])
@pytest.mark.parametrize("value_width", [16, 10])
@pytest.mark.parametrize("path", ["flash", "spans"])
def test_outputs_and_gradients_equal_attention_under_a_whole_mask(
    path: str, window: int | None, block: int, sinks: bool, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_flash, "BLOCK", block)
    monkeypatch.setattr(attention, "BLOCK", block)

    def fast(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        if path == "flash":
            return flash_attention(query, key, value, SPANS, 0.3, window, sink)
        return span_attention(query, key, value, SPANS, 0.3, window, None, sink)

    tensors = inputs(value_width)
    found = with_gradients(fast, tensors, sinks)
    expected = with_gradients(lambda *x: dense(*x, window), tensors, sinks)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 12, 100])
def test_the_parts_hold_each_visible_pair_once(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flash, "BLOCK", 3)
    count = torch.zeros(LENGTH, LENGTH, dtype=torch.long)
    for part in row_parts(SPANS, window):
        mask = attention_flash._mask(part, torch.zeros(()))
        queries, keys = (stop - start for start, stop in (part.queries, part.keys))
        pairs = torch.ones(queries, keys, dtype=torch.long) if mask is None else mask.isfinite().long()
        count[slice(*part.queries), slice(*part.keys)] += pairs.tril() if part.causal else pairs
    assert torch.equal(count, visible(window).long())


def test_no_mask_is_larger_than_a_block_and_its_window() -> None:
    spans = (Span((0, 3000), ((3000, 9000),)),)
    parts = list(row_parts(spans, 200))
    assert len(parts) > 15
    assert max((p.queries[1] - p.queries[0]) * (p.keys[1] - p.keys[0]) for p in parts) <= 512 * (512 + 200)
    assert [p.causal for p in row_parts(spans, None)] == [True, False, True]


def test_a_completion_in_bfloat16_does_not_hear_its_neighbours() -> None:
    tensors = [draw(4, 16, 1, torch.bfloat16), draw(2, 16, 2, torch.bfloat16), draw(2, 16, 3, torch.bfloat16)]
    others = [x.detach().clone() for x in tensors]
    for x in others:
        x[:, :, 9:15] = 7.0
    outs: list[Any] = [flash_attention(*made, SPANS, 0.3, None, None) for made in (tensors, others)]
    assert outs[0].dtype == torch.bfloat16
    apart = (outs[0] != outs[1]).any(-1).any(1)[0].nonzero().flatten().tolist()
    assert apart == list(range(9, 15))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "value_width"), [(None, 16), (None, 10), (2, 16), (8, 16), (25, 16)])
def test_many_short_completions_attend_as_under_a_whole_mask(window: int | None, value_width: int, sinks: bool) -> None:
    spans = many()
    tensors = inputs(value_width, length_of(spans))
    exact = [x.detach().double().requires_grad_() for x in tensors]
    found = with_gradients(lambda q, k, v, sink: flash_attention(q, k, v, spans, 0.3, window, sink), tensors, sinks)
    expected = with_gradients(lambda q, k, v, sink: dense(q, k, v, sink, window, spans), exact, sinks)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("number", range(16))
def test_a_nan_in_one_completion_leaves_the_others_and_their_gradients_as_they_were(number: int) -> None:
    spans = many()
    start, stop = spans[0].completions[number]
    others = torch.ones(length_of(spans), dtype=torch.bool)
    others[start:stop] = False

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return flash_attention(query, key, value, spans, 0.3, None, sinks)

    tensors = inputs(length=len(others))
    clean = with_gradients(attend, tensors, sinks=False)
    with torch.no_grad():
        for x in tensors[:3]:
            x[:, :, start:stop] = torch.nan
    out, *gradients = with_gradients(attend, tensors, sinks=False)
    assert torch.equal(out[:, :, others], clean[0][:, :, others])
    assert out[:, :, start:stop].isnan().all()
    others[slice(*spans[0].prompt)] = False  # the completion attends to its prompt
    for one, other in zip(gradients, clean[1:], strict=True):
        assert torch.equal(one[:, :, others], other[:, :, others])


def calls_of(spans: Sequence[Span], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """The queries of each call, forward and then backward, and the row's."""
    seen = []
    for name, place in (("_flash", 0), ("_flash_backward", 1)):
        right = getattr(attention_flash, name)

        def counted(*args: Any, right: Any = right, place: int = place, **options: Any) -> Any:
            seen.append(args[place])
            return right(*args, **options)

        monkeypatch.setattr(attention_flash, name, counted)
    query, key, value = (draw(heads, 16, 1, dtype, length_of(spans)) for heads in (4, 2, 2))
    by_token = query.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    flash_attention(by_token, key, value, spans, 0.3, None, None).sum().backward()
    return seen, by_token


def test_short_completions_share_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = many()[:2]
    seen, _ = calls_of(spans, monkeypatch, torch.float32)
    assert len(seen) <= 2 * (2 + 2 + 3)  # forward and backward: prompts, completions to prompts, lengths 10, 15 and 20


def test_a_short_completion_is_not_padded_to_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (span_of(30, [10, 11, 12, 14, 100, 90, 60, 60, 90, 100] * 2),)
    seen, query = calls_of(spans, monkeypatch, torch.float32)
    of_completions_to_prompt = query[:, :, 30:].numel()
    own = [queries.numel() for queries in seen[: len(seen) // 2]]
    padding = 4 * 2 * (4 + 3 + 2)  # heads x completions x to the longest of 10 to 14
    assert sum(own) == query.numel() + of_completions_to_prompt + padding * 16


def test_a_long_part_is_attended_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (span_of(300, [20, 300]),)
    for dtype in (torch.float32, torch.bfloat16):
        seen, query = calls_of(spans, monkeypatch, dtype)
        at = query.untyped_storage().data_ptr()
        there = [tuple(x.shape[:3]) for x in seen[:4] if x.untyped_storage().data_ptr() == at]
        large = [(2, 2, 300), (2, 2, 300), (2, 2, 320)]
        assert sorted(there) == ([(2, 2, 20), *large] if dtype == torch.float32 else large)
        assert {x.dtype for x in seen if x.shape[2] <= 20} == {torch.float32}, "small products are faster in float32"
