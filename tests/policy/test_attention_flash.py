from collections.abc import Callable
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


def draw(heads: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(1, heads, LENGTH, width, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).requires_grad_()


def inputs(value_width: int = 16) -> list[Tensor]:
    """Query, key, value of four heads, two of them to each key, and a sink for each."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return [draw(4, 16, 1), draw(2, 16, 2), draw(2, value_width, 3), sinks]


def visible(window: int | None) -> Tensor:
    """[query, key], by the definition."""
    group, completion, position = (torch.full((LENGTH,), -1) for _ in range(3))
    count = 0
    for number, span in enumerate(SPANS):
        for place in range(*span.prompt):
            group[place], position[place] = number, place - span.prompt[0]
        for first, last in span.completions:
            count += 1
            for place in range(first, last):
                group[place], completion[place] = number, count
                position[place] = place - first + span.prompt[1] - span.prompt[0]
    own = (completion[None] == -1) | (completion[None] == completion[:, None])
    seen = (group[None] == group[:, None]) & own & (torch.arange(LENGTH)[None] <= torch.arange(LENGTH)[:, None])
    return seen if window is None else seen & (position[:, None] - position[None] < window)


def dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores.masked_fill(~visible(window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, LENGTH, 1)], -1)
    return scores.softmax(-1)[..., :LENGTH] @ value.repeat_interleave(2, 1)


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
