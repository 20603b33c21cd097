"""Which rows belong to which run and step: duplicates, rows in disorder, resumed runs, several runs in one log."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from leadline.doctor.table import MISSING, Column, Floats, Table

Rows = NDArray[np.int64]

CLOCKS = ("time/", "throughput/", "memory/", "unread/")
"""Families that may differ between two copies of the same row."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The rows of one run, one for each step, in order."""

    table: Table
    notes: tuple[str, ...] = ()


def runs_of(table: Table, named: Sequence[tuple[int, str]] = ()) -> list[Ordered]:
    """The runs in a table whose rows come as they were logged. `named`: rows at which another run's name stands."""
    if len({name for _, name in named}) > 1:
        return _by_name(table, named)
    steps = table.steps
    if len(steps) < 2 or _rises(steps):
        return [Ordered(table)]
    conflict = _first_conflict(table)
    if conflict is None:
        return [_merged(table, steps)]
    descents = np.flatnonzero(steps[1:] < steps[:-1]) + 1
    if not len(descents):
        merged = _merged(table, steps)
        note = f"Step {conflict:g} was logged more than once with different values; the last one counts."
        return [Ordered(merged.table, (*merged.notes, note))]
    return _segments(table, descents)


def _rises(steps: Floats) -> bool:
    return bool((steps[1:] > steps[:-1]).all())


def _by_name(table: Table, named: Sequence[tuple[int, str]]) -> list[Ordered]:
    names = np.empty(len(table), dtype=object)
    for row, name in named:
        names[row:] = name
    names[: named[0][0]] = named[0][1]
    found = []
    for name in dict.fromkeys(name for _, name in named):
        (run,) = _merged_runs(table.take(np.flatnonzero(names == name)))
        found.append(Ordered(run.table, (f"The log holds several runs; this one is {name}.", *run.notes)))
    return found


def _merged_runs(table: Table) -> list[Ordered]:
    steps = table.steps
    ordered = len(steps) < 2 or _rises(steps)
    return [Ordered(table) if ordered else _merged(table, steps)]


def _segments(table: Table, descents: Rows) -> list[Ordered]:
    """Where steps fall back: to the start is another run, to the middle is a run that was resumed."""
    if len(descents) > max(8, len(table) // 4):
        merged = _merged(table, table.steps)
        note = "Rows are in disorder and repeat steps with different values; the last value of each step counts."
        return [Ordered(merged.table, (*merged.notes, note))]
    bounds = [0, *descents.tolist(), len(table)]
    parts = [np.arange(first, end) for first, end in pairwise(bounds)]
    runs: list[list[Rows]] = [[parts[0]]]
    for part in parts[1:]:
        starts_anew = table.steps[part[0]] <= table.steps[runs[-1][0][0]]
        if starts_anew:
            runs.append([part])
        else:
            runs[-1].append(part)
    found = [_resumed(table, run) for run in runs]
    if len(found) == 1:
        return found
    return [
        Ordered(run.table, (f"The log holds {len(found)} runs one after the other; this is run {i}.", *run.notes))
        for i, run in enumerate(found, start=1)
    ]


def _resumed(table: Table, parts: Sequence[Rows]) -> Ordered:
    kept, dropped = parts[0], 0
    restarts = []
    for part in parts[1:]:
        first = table.steps[part[0]]
        before = kept[table.steps[kept] < first]
        # rows of the same step that only complement each other are no second attempt
        dropped += len(kept) - len(before)
        restarts.append(f"{first:g}")
        kept = np.concatenate([before, part])
    merged = _merged_runs(table.take(kept))[0]
    if not restarts:
        return merged
    note = f"The run was resumed at step {', '.join(restarts)}; {dropped} rows of abandoned attempts were left out."
    return Ordered(merged.table, (note, *merged.notes))


def _first_conflict(table: Table) -> float | None:
    """A step that has two different values of one quantity; None if rows of a step agree or complement each other."""
    order = np.argsort(table.steps, kind="stable")
    steps = table.steps[order]
    for name, column in table.columns.items():
        if name.startswith(CLOCKS):
            continue
        there = column.codes[order] != MISSING
        values, places = column.values[order][there], steps[there]
        same = places[1:] == places[:-1]
        if same.any():
            differ = same & ~_equal(values[1:], values[:-1])
            if differ.any():
                return float(places[1:][differ][0])
    return None


def _equal(left: Floats, right: Floats) -> NDArray[np.bool_]:
    return np.isclose(left, right, rtol=1e-6, atol=0.0, equal_nan=True)


def _merged(table: Table, steps: Floats) -> Ordered:
    """One row for each step. Where a step has several values of a quantity, the last that was logged counts."""
    unique, place = np.unique(steps, return_inverse=True)
    columns = {}
    repeated = np.zeros(len(unique), np.int64)
    for name, column in table.columns.items():
        rows = np.flatnonzero(column.codes != MISSING)
        values = np.full(len(unique), np.nan)
        codes = np.full(len(unique), MISSING, np.uint8)
        values[place[rows]] = column.values[rows]
        codes[place[rows]] = column.codes[rows]
        columns[name] = Column(values, codes)
        if not name.startswith(CLOCKS):
            repeated = np.maximum(repeated, np.bincount(place[rows], minlength=len(unique)))
    notes = []
    copies = int(np.maximum(repeated - 1, 0).sum())
    if copies:
        notes.append(f"{copies} rows were logged twice and count once.")
    if (steps[1:] < steps[:-1]).any():
        notes.append("Rows were not in the order of steps and were sorted.")
    return Ordered(Table(unique, columns), tuple(notes))
