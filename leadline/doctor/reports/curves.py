"""A series as few points: what a plot of a million rows needs, with no extreme lost."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from leadline.doctor.reports.scales import fit
from leadline.doctor.table import Floats

Point = tuple[float, float]

COLUMNS = 240
"""Columns of a plot: each keeps its lowest and its highest value."""


def reduce(steps: Floats, values: Floats, columns: int = COLUMNS) -> list[Point]:
    """The curve in at most three points per column of rows, in order: its lowest, its highest, and a value that is not
    finite if it has one; the last point is always kept. A short curve is kept whole."""
    chosen = np.arange(len(values))
    if len(values) > 4 * columns:
        edges = np.linspace(0, len(values), columns + 1).astype(int)
        kept = {int(low) + place for low, high in pairwise(edges) for place in _extremes(values[low:high])}
        chosen = np.array(sorted(kept | {len(values) - 1}))
    return list(zip(steps[chosen].tolist(), values[chosen].tolist(), strict=True))


def _extremes(part: Floats) -> set[int]:
    finite = np.isfinite(part)
    places = {int(np.argmin(finite))} if not finite.all() else set()
    if finite.any():
        places |= {int(np.argmin(np.where(finite, part, np.inf))), int(np.argmax(np.where(finite, part, -np.inf)))}
    return places


def segments(points: Sequence[Point]) -> list[list[Point]]:
    """The unbroken pieces of a curve: it breaks where a value is not finite."""
    pieces: list[list[Point]] = [[]]
    for step, value in points:
        if not math.isfinite(value):
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [piece for piece in pieces if piece]


def undefined(points: Sequence[Point], columns: int = 60) -> list[float]:
    """Steps at which the value is NaN or infinite, at most `columns` of them, spread evenly."""
    steps = [step for step, value in points if not math.isfinite(value)]
    return steps if len(steps) <= columns else [steps[index * len(steps) // columns] for index in range(columns)]


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """One line of blocks; `!` where a value is NaN or infinite. On a log scale if the values span decades."""
    columns = min(width, len(values))
    parts = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    heights = [_height(part) for part in parts]
    finite = [value for value in heights if math.isfinite(value)]
    if not finite:
        return "!" * columns
    scale = fit(finite)
    low, high = scale(min(finite)), scale(max(finite))
    span = (high - low) or 1.0
    return "".join(
        BLOCKS[min(7, int((scale(value) - low) / span * 8))] if math.isfinite(value) else "!" for value in heights
    )


def _height(part: Sequence[float]) -> float:
    """The mean of a column; NaN if any value in it is not finite, so that no NaN is averaged away."""
    return math.fsum(part) / len(part) if all(map(math.isfinite, part)) else math.nan
