import math

import pytest

from leadline.metrics import LEDGER_STAGES
from leadline.panels import STAGE_COLORS, bar_cells, chart


def test_every_stage_of_the_ledger_has_a_colour_of_its_own() -> None:
    assert tuple(STAGE_COLORS) == LEDGER_STAGES
    assert len(set(STAGE_COLORS.values())) == len(LEDGER_STAGES)


def test_a_chart_rises_from_its_lowest_to_its_highest_value() -> None:
    assert chart([0, 1, 2, 3, 4, 5, 6, 7], width=20, height=1) == ["▁▂▃▄▅▆▇█"]
    assert chart([0.0, 15.0], width=20, height=2) == [" █", "▁█"]


def test_a_chart_of_more_values_than_columns_shows_their_means_over_the_whole_width() -> None:
    (line,) = chart([0.0] * 50 + [7.0] * 50, width=10, height=1)
    assert line == "▁▁▁▁▁█████"
    assert len(chart(range(101), width=38, height=1)[0]) == 38


def test_a_chart_leaves_nan_blank() -> None:
    assert chart([0.0, math.nan, 7.0], width=3, height=1) == ["▁ █"]
    assert chart([math.nan, math.nan], width=3, height=1) == ["  "]
    assert chart([], width=3, height=2) == ["", ""]


def test_a_flat_chart_is_low() -> None:
    assert chart([3.0, 3.0], width=3, height=2) == ["  ", "▁▁"]


@pytest.mark.parametrize("width", [10, 36, 46])
def test_the_bar_is_full_whatever_the_shares(width: int) -> None:
    shares = {"reached": 0.333, "clipped": 0.333, "stale": 0.334, "failed": math.nan, "ratio_drift": -0.1}
    cells = bar_cells(shares, width)
    assert sum(cells.values()) == width
    assert set(cells) == {"reached", "clipped", "stale"}


def test_a_stage_in_the_legend_is_in_the_bar() -> None:
    cells = bar_cells({"reached": 0.98, "clipped": 0.011, "stale": 0.006, "failed": 0.003}, 40)
    assert cells == {"reached": 38, "clipped": 1, "stale": 1, "failed": 0}


def test_there_is_no_bar_without_shares() -> None:
    assert bar_cells({"reached": math.nan}, 40) == {}
