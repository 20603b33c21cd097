"""Rows as they come from a log, gathered into columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.doctor.table import MISSING, Column, Floats

BLOCK = 2048
"""Rows that are held as objects before they become columns."""
MAX_KEYS = 5000
MAX_KEY_LENGTH = 200
HOISTED = ("data", "metrics", "logs")
"""Names under which loggers put a row's metrics; they say nothing themselves."""
RUN_KEYS = ("run_id", "run_name", "run")
"""Text that tells several runs in one file apart."""
PROGRESS = "global_step/max_steps"
_NONE = object()

Rows = NDArray[np.int64]


@dataclass
class Collected:
    """What one source holds: raw columns and settings, under the names that stand there."""

    source: str
    length: int = 0
    chunks: dict[str, list[tuple[Rows, Column]]] = field(default_factory=dict)
    runs: list[tuple[int, str]] = field(default_factory=list)
    """Row at which another run's name first stands, and the name."""
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    framework: str | None = None
    """Known from the form of the lines."""
    decimals: dict[str, int] = field(default_factory=dict)
    """Key -> most digits after the point, for numbers that were printed."""
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    canonical: bool = False
    """The keys are canonical already: they were computed from a dump."""
    rank: int = 0
    """Of two sources of one run, the lower is believed first."""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.chunks)

    def column(self, key: str) -> Column:
        """One key over all rows."""
        values = np.full(self.length, np.nan)
        codes = np.full(self.length, MISSING, np.uint8)
        for rows, piece in self.chunks.get(key, ()):
            values[rows], codes[rows] = piece.values, piece.codes
        return Column(values, codes)

    def take(self, key: str) -> Column:
        """The same, and forgets where it came from: a key is needed once."""
        column = self.column(key)
        del self.chunks[key]
        return column


class Collector:
    """Turns rows into a `Collected`. Rows of the same keys, which is nearly all of them, are converted at once."""

    def __init__(self, source: str) -> None:
        self.collected = Collected(source)
        self._held: list[tuple[int, Mapping[str, Any]]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row, flat or nested."""
        self._held.append((self.collected.length, row))
        self.collected.length += 1
        if len(self._held) >= BLOCK:
            self._flush()

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """More rows."""
        for row in rows:
            self.add(row)

    def finish(self) -> Collected:
        """All that was added."""
        self._flush()
        self.collected.runs.sort()
        return self.collected

    def _plain(self, index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row without nesting, and without what is not a metric but says which run or step it is of."""
        if any(isinstance(value, dict) for value in row.values()):
            row = self._flat(row)
        progress = row.get(PROGRESS)
        if isinstance(progress, str):
            row = {**row, PROGRESS: progress.partition("/")[0]}
        for key in RUN_KEYS:
            name = row.get(key)
            if isinstance(name, str):
                self.collected.runs.append((index, name))
                break
        return row

    def _flat(self, row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, dict):
                if key == "config" and not prefix:
                    self.collected.options.update(value)
                elif depth < 4:
                    below = prefix if key in HOISTED else f"{prefix}{key}/"
                    flat.update(self._flat(value, below, depth + 1))
            else:
                flat[f"{prefix}{key}"] = value
        return flat

    def _flush(self) -> None:
        held, self._held = self._held, []
        for keys, indices, rows in _groups(held):
            numbers = _numbers(keys, rows)
            if numbers is not None:
                self._store(keys, indices, numbers)
                continue
            plain = [(index, self._plain(index, row)) for index, row in zip(indices.tolist(), rows, strict=True)]
            for names, places, same in _groups(plain):
                self._store(names, places, [_column([row[name] for row in same]) for name in names])

    def _store(self, keys: Sequence[str], indices: Rows, columns: Sequence[Column | None]) -> None:
        chunks = self.collected.chunks
        for key, column in zip(keys, columns, strict=True):
            if column is None or len(key) > MAX_KEY_LENGTH:
                continue
            if key not in chunks and len(chunks) >= MAX_KEYS:
                note = f"The log has more than {MAX_KEYS} keys; the rest was left out."
                if note not in self.collected.notes:
                    self.collected.notes.append(note)
                continue
            chunks.setdefault(key, []).append((indices, column))


def _groups(
    held: Sequence[tuple[int, Mapping[str, Any]]],
) -> Iterator[tuple[tuple[str, ...], Rows, list[Mapping[str, Any]]]]:
    """Rows with the same keys in the same order."""
    groups: dict[tuple[str, ...], tuple[list[int], list[Mapping[str, Any]]]] = {}
    for index, row in held:
        indices, rows = groups.setdefault(tuple(row), ([], []))
        indices.append(index)
        rows.append(row)
    for keys, (indices, rows) in groups.items():
        yield keys, np.array(indices, np.int64), rows


def _numbers(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Column] | None:
    """The columns of rows that hold nothing but numbers; None if they hold anything else."""
    try:
        flat = np.fromiter(chain.from_iterable(row.values() for row in rows), np.float64, len(rows) * len(keys))
    except (TypeError, ValueError, OverflowError):
        return None
    if np.isnan(flat).any() and any(value is None for row in rows for value in row.values()):
        return None  # numpy would make NaN of a null
    table = flat.reshape(len(rows), len(keys))
    return [Column.of_numbers(table[:, i].copy()) for i in range(len(keys))]


def _column(values: Sequence[Any]) -> Column | None:
    """None for lists and other things that are no metric."""
    numbers: Floats | None = None
    if not any(value is None or isinstance(value, str) for value in values):
        try:
            numbers = np.fromiter(values, np.float64, len(values))
        except (TypeError, ValueError, OverflowError):
            numbers = None
    if numbers is not None:
        return Column.of_numbers(numbers)
    if all(isinstance(value, list | dict | tuple) for value in values):
        return None
    return Column.of([_NONE if value == "" else value for value in values], _NONE)
