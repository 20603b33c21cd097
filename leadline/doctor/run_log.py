"""What a run logged, in canonical quantities."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Streak:
    """Logged values in a row that all break the same limit. Example: Streak(first=3, last=5, length=3, value=0.97)."""

    first: int
    last: int
    length: int
    value: float
    """The value at `last`."""


@dataclass(frozen=True, slots=True)
class RunLog:
    """Rows in the order in which they were logged, and the settings of the run where they are known.

    A key that is absent from a row was not logged; a NaN was logged and is undefined. The two are never confused.

    Example:
        RunLog(rows=[{"step": 1, "loss": 1e-9, "kl/k3": float("nan")}], config={"model": {"dtype": "float32"}})
    """

    rows: Sequence[Mapping[str, float]]
    config: Mapping[str, Any] | None = None

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[float]], config: Mapping[str, Any] | None = None) -> Self:
        """A log of steps 1, 2, ... from one list of values per quantity, all of the same length."""
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return cls([{"step": step, **row} for step, row in enumerate(rows, start=1)], config)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each row in which the quantity was logged, NaN included."""
        return [(int(row["step"]), row[name]) for row in self.rows if name in row]

    def is_missing(self, name: str) -> bool:
        """No row has the quantity."""
        return not any(name in row for row in self.rows)

    def is_undefined(self, name: str) -> bool:
        """Rows have the quantity, and it is NaN in all of them."""
        return not self.is_missing(name) and all(math.isnan(value) for _, value in self.series(name))

    def setting(self, name: str) -> Any:
        """The value of a setting such as `model.dtype`; None if it is not known."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def streaks(self, name: str, broken: Callable[[float], bool], length: int) -> list[Streak]:
        """Each longest run of at least `length` values in a row for which `broken` holds; a NaN says nothing, so it
        neither counts nor ends a run."""
        found: list[Streak] = []
        current: Streak | None = None
        for step, value in self.series(name):
            if math.isnan(value):
                continue
            if not broken(value):
                current = None
                continue
            if current is not None:
                found.pop()
                current = Streak(current.first, step, current.length + 1, value)
            else:
                current = Streak(step, step, 1, value)
            found.append(current)
        return [streak for streak in found if streak.length >= length]


def above(limit: float) -> Callable[[float], bool]:
    """True of values greater than the limit."""
    return lambda value: value > limit


def below(limit: float) -> Callable[[float], bool]:
    """True of values less than the limit."""
    return lambda value: value < limit
