import math

from hypothesis import given
from hypothesis import strategies as st

from leadline.doctor.reports.scales import Scale, fit, whole_ticks

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def test_a_log_scale_puts_a_decade_in_the_middle_of_two() -> None:
    assert Scale(1.0, 100.0, log=True)(10.0) == 0.5


def test_positive_values_that_span_decades_get_a_log_scale_and_others_do_not() -> None:
    assert fit([1e-8, 1.0]).log
    assert not fit([0.1, 1.0]).log
    assert not fit([-1e-8, 1.0]).log


def test_ticks_are_round() -> None:
    assert Scale(0.0, 1.03).ticks() == [0.0, 0.5, 1.0]
    assert Scale(0.9e-8, 1.1, log=True).ticks() == [1e-6, 1e-3, 1.0]


@given(st.lists(NUMBERS, max_size=20), st.sampled_from([None, True, False]), st.sampled_from([None, 0.0]))
def test_any_values_have_a_scale_with_places_and_ticks_within_it(
    values: list[float], log: bool | None, anchor: float | None
) -> None:
    scale = fit(values, log, anchor)
    assert scale.low < scale.high
    assert all(0.0 <= scale(value) <= 1.0 for value in values if math.isfinite(value))
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(ticks)


def test_step_ticks_are_whole_and_within() -> None:
    assert whole_ticks(1, 120) == [25, 50, 75, 100]
    assert whole_ticks(7, 7) == [7]


def test_a_constant_lies_in_the_middle_of_its_scale() -> None:
    assert fit([0.0, 0.0]) == Scale(-1.0, 1.0)
    assert fit([4.0]) == Scale(2.0, 6.0)


def test_the_anchor_is_in_sight() -> None:
    assert fit([1e-10, 1e-8], log=True, anchor=1.0).high > 1.0
    assert fit([0.4, 0.5], anchor=0.0).low == 0.0
