"""What a run logged, column by column: a value and its state for each row. Compact, and fast to read and to search."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.uint8]

VANISHED_ROWS = 3
VANISHED_GAPS = 3
"""A quantity has vanished when the rows without it at the end are at least `VANISHED_ROWS`, and `VANISHED_GAPS` times
as many as ever lay between two that had it: what is logged every tenth row is not taken for lost after three."""


class State(StrEnum):
    """What a row says about a quantity. Only `present` is a usable number."""

    PRESENT = "present"
    MISSING = "missing"
    """The key is not there."""
    NULL = "null"
    """The key is there, its value is null."""
    DROPPED = "dropped"
    """The key is not there any more: earlier rows had it, none from here on does."""
    PLACEHOLDER = "placeholder"
    """A number that the framework writes when it has computed nothing."""
    NON_FINITE = "non_finite"
    """NaN or an infinity."""
    STRING = "string"
    """Text that is no number, or a number that print rounded away."""


STATES: tuple[State, ...] = tuple(State)
"""A state's place here is its code."""
PRESENT, MISSING, NULL, DROPPED, PLACEHOLDER, NON_FINITE, STRING = range(len(STATES))
LOGGED = (PRESENT, NULL, NON_FINITE)
"""Codes of what counts as logged: a number, or one that is undefined."""
_IS_LOGGED = np.isin(np.arange(len(STATES)), LOGGED)

_WORDS = {"nan": np.nan, "inf": np.inf, "infinity": np.inf, "-inf": -np.inf, "-infinity": -np.inf, "+inf": np.inf}


@dataclass(frozen=True, slots=True)
class Column:
    """One quantity over all rows: values (NaN where there is no number) and state codes, of the same length."""

    values: Floats
    codes: Codes

    @classmethod
    def of(cls, values: Sequence[Any], missing: Any) -> Self:
        """From anything that a log may hold; items that are `missing` itself were not logged."""
        known = [np.nan if value is missing else value for value in values]
        if all(type(value) is float for value in known):  # the common case, and the live doctor asks at every step
            column = cls.of_numbers(np.array(known, np.float64))
            column.codes[[value is missing for value in values]] = MISSING
            return column
        numbers = np.full(len(values), np.nan)
        codes = np.empty(len(values), np.uint8)
        for i, value in enumerate(values):
            codes[i], numbers[i] = (MISSING, np.nan) if value is missing else coded(value)
        return cls(numbers, codes)

    @classmethod
    def of_numbers(cls, values: Floats) -> Self:
        """From numbers that were all logged."""
        return cls(values, np.where(np.isfinite(values), PRESENT, NON_FINITE).astype(np.uint8))

    @property
    def logged(self) -> NDArray[np.bool_]:
        """True of the rows that have a number or an undefined one."""
        known: NDArray[np.bool_] = _IS_LOGGED[self.codes]
        return known

    def take(self, rows: NDArray[Any]) -> "Column":
        """The same at other rows: indices or a mask."""
        return Column(self.values[rows], self.codes[rows])


def coded(value: Any) -> tuple[int, float]:
    """State code and number of one logged value."""
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            value = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            return STRING, np.nan
    if value is None:
        return NULL, np.nan
    try:
        number = float(value)
    except OverflowError:
        return NON_FINITE, np.inf
    except (TypeError, ValueError):
        return STRING, np.nan
    return (PRESENT if np.isfinite(number) else NON_FINITE), number


class Table(Sequence[Mapping[str, float]]):
    """Rows as columns. As a sequence it gives each row's logged values, `step` among them.

    Example: Table(np.array([1.0, 2.0]), {"loss": Column.of_numbers(np.array([0.5, np.nan]))})
    """

    def __init__(self, steps: Floats, columns: Mapping[str, Column]) -> None:
        self.steps = steps
        self.columns = dict(columns)

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """The same rows; a row without a step is numbered by its place, from 1."""
        missing = object()
        numbers = [coded(row.get("step", i)) for i, row in enumerate(rows, start=1)]
        steps = [number if code == PRESENT else float(i) for i, (code, number) in enumerate(numbers, start=1)]
        names = {name: None for row in rows for name in row if name != "step"}
        return cls(
            np.array(steps, np.float64),
            {name: Column.of([row.get(name, missing) for row in rows], missing) for name in names},
        )

    def take(self, rows: NDArray[Any]) -> "Table":
        """The table of other rows: indices or a mask."""
        return Table(self.steps[rows], {name: column.take(rows) for name, column in self.columns.items()})

    def states(self, name: str) -> Codes:
        """The code of each row; a key that vanished is DROPPED in the rows after its last."""
        column = self.columns.get(name)
        if column is None:
            return np.full(len(self), MISSING, np.uint8)
        last = vanished_after(column.codes)
        if last is None:
            return column.codes
        codes = column.codes.copy()
        codes[last + 1 :] = DROPPED
        return codes

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, float]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, float] | Sequence[Mapping[str, float]]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._row(index)

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        return (self._row(i) for i in range(len(self)))

    def _row(self, i: int) -> Mapping[str, float]:
        row = {"step": float(self.steps[i])}
        row.update(
            (name, float(column.values[i])) for name, column in self.columns.items() if column.codes[i] in LOGGED
        )
        return row


def vanished_after(codes: Codes) -> int | None:
    """The last row that has the key, if the key vanished after it; None if it did not."""
    had = np.flatnonzero(codes != MISSING)
    if len(had) == 0:
        return None
    last = int(had[-1])
    absent = len(codes) - 1 - last
    longest_gap = int(np.diff(had).max() - 1) if len(had) > 1 else 0
    # a key of a single row was never a series: a summary at the end, an evaluation before step 1
    if len(had) < 2 or absent < max(VANISHED_ROWS, VANISHED_GAPS * longest_gap):
        return None
    return last
