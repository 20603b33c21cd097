"""The measures of a gap, against values that can be counted by hand."""

import math

import pytest
import torch

from leadline.probes.engine.gap import Gap, correlation, measure_gap


def gap(delta: list[float], owner: list[int] | None = None, engine: float = -1.0) -> Gap:
    values = torch.tensor(delta, dtype=torch.float64)
    mu = torch.full_like(values, engine)
    of = torch.tensor(owner or [0] * len(delta))
    positions = torch.tensor([of[:i].eq(of[i]).sum() for i in range(len(of))])
    return measure_gap(mu, mu + values, of, positions, None)


def test_means_tails_and_sums_are_those_of_the_scored_tokens() -> None:
    found = gap([0.1, -0.3, math.nan, 0.4], owner=[0, 0, 1, 1])
    assert (found.tokens, found.completions, found.unscored) == (3, 2, 1)
    assert found.mean_abs == pytest.approx(0.8 / 3)
    assert found.mean == pytest.approx(0.2 / 3)
    assert found.max_abs == pytest.approx(0.4)
    assert found.negative == pytest.approx(1 / 3)
    assert (found.sequence_min, found.sequence_max) == (pytest.approx(-0.2), pytest.approx(0.4))


def test_a_token_that_one_side_lacks_enters_nothing() -> None:
    for missing in (math.nan, math.inf, -math.inf):
        found = gap([0.1, missing])
        assert (found.tokens, found.unscored, found.mean_abs) == (1, 1, pytest.approx(0.1))


def test_an_equal_offset_is_one_sided_and_noise_is_not() -> None:
    assert gap([-0.1] * 8).one_sided == pytest.approx(1)
    assert gap([-0.1, 0.1] * 4).one_sided == pytest.approx(0)


def test_an_offset_leaves_the_ess_whole_and_the_mean_weight_shows_it() -> None:
    found = gap([-0.09] * 256)
    by_name = {(c.level, c.action): c for c in found.corrections}
    sequence = by_name["sequence", "truncate"]
    assert sequence.ess == pytest.approx(1)
    assert sequence.mean_weight == pytest.approx(math.exp(-0.09 * 256), rel=1e-3)
    assert by_name["sequence", "mask"].masked == 1
    assert by_name["geometric", "mask"].masked == 1
    assert by_name["token", "truncate"].masked == 0
    assert by_name["token", "truncate"].mean_weight == pytest.approx(math.exp(-0.09))


def test_the_ess_of_sequence_weights_counts_completions_and_not_their_tokens() -> None:
    found = gap([math.log(2.0)] + [0.0] * 9 + [0.0] * 10, owner=[0] * 10 + [1] * 10)
    sequence = next(c for c in found.corrections if (c.level, c.action) == ("sequence", "truncate"))
    assert sequence.ess == pytest.approx(9 / (2 * 5))


def test_confident_tokens_are_likely_to_the_engine_and_out_of_the_question_to_the_trainer() -> None:
    assert gap([-3.0, 0.0], engine=math.log(0.6)).confident == 0.5
    assert gap([-3.0, 0.0], engine=math.log(0.4)).confident == 0
    assert gap([-1.9, 0.0], engine=math.log(0.6)).confident == 0


def test_the_bins_hold_every_token_once_and_in_order() -> None:
    found = gap([0.01 * i for i in range(40)])
    assert sum(one.tokens for one in found.by_position) == 40
    assert [one.low for one in found.by_position] == sorted(one.low for one in found.by_position)
    assert found.by_position[0].mean_abs < found.by_position[-1].mean_abs
    assert found.position_correlation == pytest.approx(1)


def test_nothing_scored_is_not_zero() -> None:
    found = gap([math.nan, math.nan])
    assert found.tokens == 0 and math.isnan(found.mean_abs) and found.corrections == ()


def test_what_does_not_vary_correlates_with_nothing() -> None:
    assert math.isnan(correlation(torch.ones(4), torch.arange(4.0)))
