import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leadline.doctor.reports.curves import reduce, segments, sparkline, undefined


def test_a_short_curve_is_kept_whole() -> None:
    steps, values = np.arange(5.0), np.array([1.0, math.nan, 3.0, 2.0, 5.0])
    assert [step for step, _ in reduce(steps, values)] == [0, 1, 2, 3, 4]


def test_a_long_curve_keeps_its_spikes_its_nan_and_its_end() -> None:
    values = np.zeros(100_000)
    values[31_415], values[27_182], values[66_666] = 9.0, -9.0, math.nan
    kept = reduce(np.arange(100_000.0), values)
    assert len(kept) < 1000
    assert (31_415, 9.0) in kept
    assert (27_182, -9.0) in kept
    assert undefined(kept) == [66_666]
    assert kept[-1][0] == 99_999
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_a_curve_breaks_where_it_is_not_finite() -> None:
    assert segments([(1, 1.0), (2, math.inf), (3, 3.0), (4, 4.0)]) == [[(1, 1.0)], [(3, 3.0), (4, 4.0)]]


def test_a_sparkline_shows_a_nan_rather_than_averaging_it_away() -> None:
    assert sparkline([0.0, 1.0, math.nan, 2.0]) == "▁▅!█"
    assert sparkline([math.nan] * 3) == "!!!"
    assert sparkline([5.0, 5.0]) == "▁▁"


@given(st.lists(st.floats(), max_size=200))
def test_any_values_have_a_sparkline(values: list[float]) -> None:
    assert len(sparkline(values)) == min(32, len(values))
