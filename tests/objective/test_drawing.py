"""Drawing by blocks finds what drawing from all cumulative probabilities finds."""

import math

import pytest
import torch

from leadline.objective.drawing import draw_scored
from leadline.objective.logprobs import token_logprobs
from leadline.objective.sampling import draw


@pytest.mark.parametrize("vocab", [5, 256, 300, 1024])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_it_finds_the_entry_of_the_plain_search_and_scores_it(vocab: int, spread: float) -> None:
    draws = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(400, vocab, generator=draws)
    logits[torch.rand(logits.shape, generator=draws) < 0.3] = -math.inf
    logits[:, 2] = 0.0
    uniforms = torch.rand(400, generator=draws)
    ids, logprobs = draw_scored(logits, uniforms)
    # The plain search sums float64 exponentials, this one float32 ones: they may part where a sum falls on the uniform.
    cumulative = logits.double().softmax(-1).cumsum(-1)
    edge = (cumulative - uniforms.double()[:, None]).abs().amin(-1) < 1e-6
    assert torch.equal(ids[~edge], draw(logits, uniforms)[~edge])
    assert edge.float().mean() < 0.05
    torch.testing.assert_close(logprobs, token_logprobs(logits, ids), atol=1e-5, rtol=1e-6)


def test_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    logits = torch.full((20_000, 600), -math.inf)
    logits[:, [0, 100, 300, 599]] = probabilities.log()
    ids, _ = draw_scored(logits, torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(ids, minlength=600)[[0, 100, 300, 599]] / 20_000
    torch.testing.assert_close(counts, probabilities, atol=0.012, rtol=0)
    assert counts[1] == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1.0])
def test_an_entry_without_mass_is_never_drawn(uniform: float) -> None:
    logits = torch.full((3, 700), -math.inf)
    logits[0, 0] = logits[1, 350] = logits[2, 699] = 1.0
    ids, logprobs = draw_scored(logits, torch.full((3,), uniform))
    assert ids.tolist() == [0, 350, 699]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_a_distribution_is_named(value: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    with pytest.raises(ValueError, match="in row 1"):
        draw_scored(logits, torch.rand(3))
    with pytest.raises(ValueError, match="in row 0"):
        draw_scored(torch.full((1, 10), -math.inf), torch.rand(1))
