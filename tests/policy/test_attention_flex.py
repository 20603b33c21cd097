"""On a CPU flex attention has no backward pass, so here it is the forward pass, and which pairs the mask lets through."""

import pytest
import torch

from leadline.policy.attention_flash import flash_attention
from leadline.policy.attention_flex import RowMask, flex_row_attention
from tests.policy.test_attention_flash import LENGTH, SPANS, dense, inputs, visible

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("window", [None, 1, 4, 7, 12, 100])
def test_the_mask_lets_through_the_visible_pairs(window: int | None) -> None:
    seen = RowMask(SPANS, LENGTH, torch.device("cpu"))._seen(window)
    place = torch.arange(LENGTH)
    none = torch.zeros((), dtype=torch.long)
    assert torch.equal(seen(none, none, place[:, None], place[None]), visible(window))


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_output_is_that_of_the_other_implementations(window: int | None, sinks: bool) -> None:
    query, key, value, sink = (x.detach() for x in inputs())
    mask = RowMask(SPANS, LENGTH, query.device)
    found = flex_row_attention(query, key, value, mask, 0.3, window, None, sink if sinks else None)
    torch.testing.assert_close(found, dense(query, key, value, sink if sinks else None, window), rtol=1e-4, atol=1e-5)
    flash = flash_attention(query, key, value, SPANS, 0.3, window, sink if sinks else None)
    torch.testing.assert_close(found, flash, rtol=1e-4, atol=1e-5)
    assert mask.block_mask(window) is mask.block_mask(window)


def test_a_soft_cap_bounds_the_scores() -> None:
    query, key, value, _ = (x.detach() for x in inputs())
    scores = 2.0 * torch.tanh(query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3 / 2.0)
    expected = scores.masked_fill(~visible(None), -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    found = flex_row_attention(query, key, value, RowMask(SPANS, LENGTH, query.device), 0.3, None, 2.0, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
