import math

import pytest

from leadline.numerals import duration, number, share


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "n/a"),
        (math.inf, "inf"),
        (0, "0"),
        (1.0024, "1.002"),
        (0.41249, "0.412"),
        (-0.0012, "-0.0012"),
        (3.97e-10, "4.0e-10"),
        (12345, "12,345"),
        (3.2e9, "3.2e+09"),
    ],
)
def test_numbers_are_short_and_tell_missing_from_undefined(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "n/a"),
        (0.0, "0.0 %"),
        (0.0094, "0.9 %"),
        (0.0996, "10 %"),
        (0.971, "97 %"),
        (1, "100 %"),
    ],
)
def test_shares_are_in_percent(value: float | None, text: str) -> None:
    assert share(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (math.nan, "n/a"),
        (0.04, "40ms"),
        (3.14, "3.1s"),
        (59.94, "59.9s"),
        (178, "2m 58s"),
        (3900, "1h 05m"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
