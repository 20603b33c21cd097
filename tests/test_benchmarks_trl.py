"""The comparison with TRL: what is measured, and what the page says of it."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.trl_compare.__main__ import commands
from benchmarks.trl_compare.cells import FULL, SHORT, Cell
from benchmarks.trl_compare.forced_lengths import ForcedLengths
from benchmarks.trl_compare.measure import BEST, COMPACT, OURS, OURS_BF16, OURS_LESS, SHIPPED, sides_of
from benchmarks.trl_compare.report import goals, ratio_mean, write

TIMED = [
    {
        "cell": "train:256x64x8:float32",
        "repetitions": 3,
        "seconds": {SHIPPED: [36.0, 40.0], BEST: [18.0, 20.0], OURS: [4.0, 5.0]},
    },
    {
        "cell": "train:64x64x8:float32",
        "repetitions": 1,
        "seconds": {SHIPPED: [16.0, 17.0], BEST: [8.0, 9.0], OURS: [4.0, 5.0]},
    },
    {
        "cell": "generate:256x64x8:float32",
        "repetitions": 2,
        "seconds": {SHIPPED: [9.0, 9.0], OURS: [9.0, 6.0], OURS_BF16: [3.0, 2.0]},
    },
]
MEMORY = [
    {"cell": "train:256x64x8:float32", "side": side, "bytes": megabytes * 10**6}
    for side, megabytes in ((SHIPPED, 4000), (COMPACT, 1000), (BEST, 2000), (OURS, 800), (OURS_LESS, 100))
]
GROWN = {
    "small": {"model": "tiny", "growth": [{"tokens": 1000, "seconds": 0.5, "bytes": 2_000_000}], "shares": []},
    "real": {
        "model": "m",
        "growth": [],
        "shares": [{"cell": "256x64x8", "flops_per_s": 60e9, "gemm_flops_per_s": 80e9}],
    },
}


def test_a_cell_is_written_as_it_is_named() -> None:
    assert all(Cell.parse(cell.name) == cell for cell in (*SHORT, *FULL))
    assert set(SHORT) <= set(FULL) | set(SHORT)
    with pytest.raises(ValueError, match="no cell"):
        Cell.parse("sleep:1x1x1:float32")


def test_lengths_are_a_quarter_to_all_of_the_longest_with_one_of_them_that_long() -> None:
    for cell in FULL:
        lengths = cell.lengths()
        assert len(lengths) == cell.group
        assert min(lengths) >= cell.longest // 4
        assert max(lengths) == cell.longest
        assert [len(ids) for ids in cell.completion_ids(eos=2)] == lengths
        assert len(cell.prompt_ids()) == cell.prompt


def test_both_sides_of_trl_are_in_every_comparison_of_training() -> None:
    for cell in FULL:
        sides = sides_of(cell)
        assert {SHIPPED, OURS} <= set(sides)
        assert BEST in sides or (cell.part == "generate" and cell.dtype == "float32")


def test_every_process_of_a_run_is_one_that_can_be_started_alone() -> None:
    for full in (False, True):
        started = list(commands(full, 1.0))
        assert {command[0] for command in started} == {"measure", "growth"}
        timed = [command[2] for command in started if command[:2] == ["measure", "time"]]
        assert timed == [cell.name for cell in (FULL if full else SHORT)]


def test_ratios_are_geometric_means_over_the_cells_of_a_part() -> None:
    assert ratio_mean(TIMED, "train", "float32", SHIPPED, OURS, 0) == pytest.approx(6.0)  # of 9 and 4
    assert ratio_mean(TIMED, "train", "float32", BEST, OURS, 0) == pytest.approx(3.0)
    assert math.isnan(ratio_mean(TIMED, "step", "float32", BEST, OURS, 0))


def test_a_goal_is_met_or_missed_by_what_was_measured() -> None:
    values = {name: (value, goal) for name, value, goal, _ in goals(TIMED, MEMORY, [GROWN])}
    assert values["training part, smallest ratio, best"] == (2.0, 2.0)
    assert values["generation 256x64x8, bf16 copy"] == (4.5, 3.5)  # by wall seconds
    assert values["memory above weights and gradient, of compact"] == (0.8, -0.6)
    assert values["share of the bare multiplication"] == (0.75, 0.85)
    assert math.isnan(values["whole step 256x128x8, fp32, best"][0])


def test_the_page_holds_every_measurement_and_says_what_is_missed(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    write([*MEMORY, GROWN, *TIMED], page, full=False)
    text = page.read_text()
    assert "| fp32 | 256 | 64 | 8 | **9.00** | **4.50** | 36.00 / 40.00 | 18.00 / 20.00 | 4.00 / 5.00 |" in text
    assert "| fp32, bf16 copy | 256 | 64 | 8 | **4.50** | - | 9.00 / 9.00 | - | 3.00 / 2.00 |" in text
    assert "Geometric means, float32: 6.00 (as shipped), 3.00 (at its best)." in text
    assert "| 4000 | 1000 | 2000 | 800 | 100 | 0.20 | 0.80 | 0.10 |" in text
    assert "| 256x64x8 | 60 | 80 | 75% |" in text
    assert "| memory above weights and gradient, of compact | 0.80 | ≤ 0.6 | missed:" in text
    assert "| the same, recomputing | 0.10 | ≤ 0.25 | met |" in text
    assert "nan" not in text


def test_forced_lengths_end_a_row_at_its_length_and_not_before() -> None:
    force, eos = ForcedLengths([1, 3], eos=2, prompt=4), 2
    for step, ends in enumerate(([True, False], [True, False], [True, True])):
        scores = force(torch.zeros(2, 4 + step), torch.randn(2, 5))
        assert (scores.argmax(-1) == eos).tolist() == ends
        assert torch.isinf(scores[1, eos]).item() is not ends[1]
