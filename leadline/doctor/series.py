"""One quantity over a run, as arrays: what rules compute with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from leadline.doctor.evidence import TREND
from leadline.doctor.run_log import Streak

SPARSE = 50
"""Steps that a log of a few rows must span for a trend: some log every tenth step, or quote a few rows of many."""

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST = 100
"""Stretches of one quantity that are told apart; of a log that is broken throughout, the first and the last."""


@dataclass(frozen=True, eq=False)
class Series:
    """The rows in which a quantity was logged, NaN included. Empty if it never was.

    Example: Series("loss", np.array([1, 2]), np.array([0.1, np.nan]))
    """

    name: str
    steps: NDArray[np.int64]
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    def where(self, mask: Mask) -> Self:
        return type(self)(self.name, self.steps[mask], self.values[mask])

    @cached_property
    def finite(self) -> Self:
        """Without NaN and infinities."""
        return self.where(np.isfinite(self.values))

    @cached_property
    def known(self) -> Self:
        """Without NaN."""
        return self.where(~np.isnan(self.values))

    def head(self, rows: int) -> Self:
        return type(self)(self.name, self.steps[:rows], self.values[:rows])

    def tail(self, rows: int) -> Self:
        return type(self)(self.name, self.steps[-rows:], self.values[-rows:])

    @property
    def step(self) -> int:
        """Of the last row."""
        return int(self.steps[-1]) if len(self) else 0

    @cached_property
    def median(self) -> float:
        return _median(self.finite.values) if len(self.finite) else np.nan

    @property
    def mean(self) -> float:
        return float(np.mean(self.finite.values)) if len(self.finite) else np.nan

    @property
    def low(self) -> float:
        return float(np.min(self.finite.values)) if len(self.finite) else np.nan

    @property
    def high(self) -> float:
        return float(np.max(self.finite.values)) if len(self.finite) else np.nan

    @property
    def last(self) -> float:
        return float(self.finite.values[-1]) if len(self.finite) else np.nan

    @property
    def first(self) -> float:
        return float(self.finite.values[0]) if len(self.finite) else np.nan

    @cached_property
    def early(self) -> float:
        """Median of the first fifth (three rows at least, if there are twice as many): where the run came from."""
        return self.finite.head(_fifth(len(self.finite))).median

    @cached_property
    def late(self) -> float:
        """The same of the last fifth: where it is now."""
        return self.finite.tail(_fifth(len(self.finite))).median

    @cached_property
    def noise(self) -> float:
        """Robust size of the change from row to row: 1.48 x the median absolute difference / sqrt 2."""
        values = self.finite.values
        few = len(values) < 6  # of so few rows, the change is the trend
        return 0.0 if few else float(1.4826 * _median(np.abs(np.diff(values))) / np.sqrt(2))

    @property
    def is_trend(self) -> bool:
        """Long enough to speak of a trend: 20 rows, or a few rows that lie at least 50 steps apart in all."""
        return len(self) >= TREND or (len(self) >= 3 and int(self.steps[-1] - self.steps[0]) >= SPARSE)

    def at(self, step: int) -> float:
        """The value of that step; NaN if it was not logged."""
        found = np.flatnonzero(self.steps == step)
        return float(self.values[found[-1]]) if len(found) else np.nan

    def rises(self, by: float) -> bool:
        """The end lies above the beginning by at least so much, and by three times the noise."""
        return self.late - self.early >= max(by, 3 * self.noise)

    def falls(self, by: float) -> bool:
        return self.early - self.late >= max(by, 3 * self.noise)

    def streaks(self, broken: Mask, length: int, tail: int | None = None) -> list[Streak]:
        """Each longest run of rows for which the mask holds, if it has `length` rows, or ends the log with `tail`; of
        very many the first and the last."""
        if not broken.any():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate(([False], broken, [False])).astype(np.int8)))
        starts, ends = edges[::2], edges[1::2]
        lengths = ends - starts
        keep = (lengths >= length) | ((ends == len(broken)) & (lengths >= (length if tail is None else tail)))
        starts, ends = _outer(starts[keep]), _outer(ends[keep])
        return [
            Streak(int(self.steps[a]), int(self.steps[b - 1]), int(b - a), float(self.values[b - 1]))
            for a, b in zip(starts, ends, strict=True)
        ]


def _median(values: Floats) -> float:
    """Of finite numbers, at least one; np.median takes ten times as long for a few."""
    ordered = np.sort(values)
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def _fifth(rows: int) -> int:
    return max(3, rows // 5) if rows >= 6 else max(1, rows // 2)


def above(limit: float) -> Callable[[Floats], Mask]:
    """True of values greater than the limit."""
    return lambda values: np.greater(values, limit)


def below(limit: float) -> Callable[[Floats], Mask]:
    """True of values less than the limit."""
    return lambda values: np.less(values, limit)


def _outer(places: NDArray[np.int64]) -> NDArray[np.int64]:
    return places if len(places) <= MOST else np.concatenate((places[: MOST // 2], places[-MOST // 2 :]))


def paired(one: Series, other: Series) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The steps at which both are finite, and their values there."""
    if np.array_equal(one.finite.steps, other.finite.steps):
        return one.finite.steps, one.finite.values, other.finite.values
    steps, first, second = np.intersect1d(one.finite.steps, other.finite.steps, return_indices=True)
    return steps, one.finite.values[first], other.finite.values[second]
