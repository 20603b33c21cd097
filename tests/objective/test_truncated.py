"""That scores and gradients equal those of whole logits is in `test_chunked.py`; here is what only truncation does."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.objective import truncated
from leadline.objective.chunked import chunked_scores
from leadline.objective.chunks import Replay
from tests.objective.test_chunked import REPLAYS, TOKENS, VOCAB, assert_equal, case, dense_scores, gradients


def multiplied_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of the head each gradient of hidden states was made of."""
    sizes: list[int] = []
    unique = Tensor.unique

    def spy(self: Tensor, **options: Any) -> Any:
        found = unique(self, **options)
        sizes.append(len(found[0]))
        return found

    monkeypatch.setattr(Tensor, "unique", spy)
    return sizes


@pytest.mark.parametrize("places", [1, 50, VOCAB, 3 * VOCAB], ids=str)
@pytest.mark.parametrize(
    "replay", [Replay(top_k=VOCAB), REPLAYS["top_p"], REPLAYS["all"]], ids=["all stay", "top_p", "all"]
)
def test_however_few_places_have_room_the_gradients_are_the_same(
    replay: Replay, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, tokens = case(("bias", "softcap"))
    sweep = 6 * VOCAB
    monkeypatch.setattr(truncated, "AT_ONCE", sweep // places)
    sizes: list[int] = []
    support = truncated._support

    def spy(*args: Any) -> Any:
        made = support(*args)
        sizes.append(len(made.token))
        assert len(made.token) <= places or made.tokens.stop - made.tokens.start == 1
        return made

    monkeypatch.setattr(truncated, "_support", spy)
    expected = dense_scores(hidden, head, tokens, replay)
    found = chunked_scores(hidden, head, tokens, replay, entropy_gradient=True, sweep=sweep)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
    assert_equal(gradients(found, hidden, head, True), gradients(expected, hidden, head, True))
    assert sizes


def test_only_rows_of_the_head_in_a_support_are_multiplied_with(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, tokens = case()
    sizes = multiplied_rows(monkeypatch)
    logprobs, _ = chunked_scores(hidden, head, tokens, Replay(top_k=3))
    by_weight = torch.autograd.grad(logprobs.sum(), head.weight)[0]
    assert sizes == [int(by_weight.any(1).sum())]
    assert TOKENS <= sizes[0] <= 4 * TOKENS < VOCAB


def test_ties_with_the_last_that_stays_stay_too() -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        head.weight[100:300] = head.weight[100]  # 200 entries have the same logit
    for replay in (Replay(top_k=5), Replay(top_k=5, top_p=0.95), Replay(top_p=0.4)):
        expected = dense_scores(hidden, head, tokens, replay)
        found = chunked_scores(hidden, head, tokens, replay, entropy_gradient=True)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=2e-6)
        assert_equal(gradients(found, hidden, head, True), gradients(expected, hidden, head, True))


def test_a_token_outside_its_support_has_a_logprob_and_a_gradient() -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        tokens = (hidden @ head.weight.T).argmin(-1)
    logprobs, _ = chunked_scores(hidden, head, tokens, Replay(top_k=2))
    assert bool(logprobs.isfinite().all())
    assert bool(torch.autograd.grad(logprobs.sum(), hidden)[0].any(1).all())


def test_a_nan_logit_is_a_nan_of_its_token_alone() -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        hidden[4] = math.nan
    logprobs, entropies = chunked_scores(hidden, head, tokens, REPLAYS["all"], entropy_gradient=True)
    for found in (logprobs, entropies):
        assert found.isnan().nonzero().flatten().tolist() == [4]
    others = torch.arange(TOKENS) != 4
    for gradient in torch.autograd.grad(logprobs[others].sum(), [hidden, head.weight]):
        assert bool(gradient.isfinite().all())
