"""What two columns of numbers tell without the model that made them."""

import pytest
import torch

from leadline.probes.engine.attribute import Attribution, without_model
from leadline.probes.engine.drawn import Drawn
from leadline.probes.engine.shares import shares

LENGTH, COMPLETIONS, VOCABULARY = 24, 40, 500


def draw(count: int) -> torch.Generator:
    return torch.Generator().manual_seed(count)


LOGITS = 2 * torch.randn(LENGTH * COMPLETIONS, VOCABULARY, generator=draw(0), dtype=torch.float64)
PLACES = torch.arange(len(LOGITS))
NOISE = 0.02 * torch.randn(len(LOGITS), generator=draw(1), dtype=torch.float64)


def of(engine: torch.Tensor, trainer: torch.Tensor, **known: torch.Tensor) -> Attribution:
    completions = ((0,) * LENGTH,) * COMPLETIONS
    return without_model(Drawn(((),) * COMPLETIONS, completions, engine, trainer, **known))


def sampled(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from the logits, and their logprobs."""
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=draw(2))[:, 0]
    return tokens, logits.log_softmax(-1)[PLACES, tokens]


def test_rounding_on_both_sides_is_told_as_rounding() -> None:
    _, mu = sampled(LOGITS)
    found = of(mu, mu + NOISE)
    assert found.verdict.cause == "dtype"
    assert shares(found).bug == 0


def test_a_truncated_distribution_is_likelier_to_the_engine_at_every_token() -> None:
    floor = LOGITS.topk(40).values[:, -1:]
    tokens, mu = sampled(LOGITS.masked_fill(floor > LOGITS, -torch.inf))
    assert of(mu, LOGITS.log_softmax(-1)[PLACES, tokens]).verdict.cause == "support"


def test_raw_logprobs_rise_with_the_engines_own() -> None:
    hot = LOGITS / 0.7
    tokens, scored = sampled(hot)
    found = of(LOGITS.log_softmax(-1)[PLACES, tokens], scored)
    assert found.verdict.cause in ("raw_logprobs", "temperature")
    assert "temperature" in found.verdict.detail


def test_one_place_late_is_an_experiment_and_needs_no_model() -> None:
    _, pi = sampled(LOGITS)
    late = torch.cat([torch.cat([part[-1:], part[:-1]]) for part in pi.split(LENGTH)])
    found = of(late, pi)
    assert found.verdict.cause == "off_by_one"
    assert found.verdict.explained == pytest.approx(1)


def test_other_weights_find_tokens_likely_that_are_out_of_the_question_here() -> None:
    sharp = 3 * LOGITS
    tokens, mu = sampled(sharp)
    other = 3 * torch.randn(LOGITS.shape, generator=draw(5), dtype=torch.float64)
    assert of(mu, other.log_softmax(-1)[PLACES, tokens]).verdict.cause == "other_weights"


def test_zeros_are_missing_numbers_and_not_certainty() -> None:
    _, pi = sampled(LOGITS)
    engine = torch.where(PLACES % 5 == 0, 0.0, pi)
    assert of(engine, pi).verdict.cause == "placeholders"


def test_a_gap_that_grows_with_age_is_staleness_and_is_split_off() -> None:
    _, mu = sampled(LOGITS)
    ages = (PLACES // LENGTH % 4).double()
    spread = torch.randn(len(LOGITS), generator=draw(3), dtype=torch.float64)
    found = of(mu, mu + NOISE + 0.2 * ages * spread, ages=ages)
    assert found.verdict.cause == "staleness"
    parts = shares(found)
    assert parts.staleness > 0.1 > parts.numerics > 0 and parts.bug == 0
    assert parts.staleness + parts.numerics == pytest.approx(found.gap.mean_abs)


def test_a_gap_in_the_first_tokens_is_their_context() -> None:
    _, mu = sampled(LOGITS)
    first = PLACES % LENGTH < 2
    assert of(mu, torch.where(first, mu - 2.5, mu + NOISE)).verdict.cause in ("first_tokens", "other_weights")
    assert any(mark.cause == "first_tokens" for mark in of(mu, torch.where(first, mu - 1.5, mu + NOISE)).marks)


def test_equal_columns_are_right() -> None:
    _, mu = sampled(LOGITS)
    found = of(mu, mu)
    assert found.verdict.cause == "noise"
    assert any("--model" in line for line in found.not_checked)
