"""What a run logged, in canonical quantities, and the settings that it ran with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from leadline.doctor.table import MISSING, PRESENT, STATES, Floats, State, Table

UNREAD = "unread/"
"""What the columns of a table begin with that have no canonical meaning; `RunLog.names` leaves them out."""


@dataclass(frozen=True, slots=True)
class Streak:
    """Logged values in a row that all break the same limit. Example: Streak(first=3, last=5, length=3, value=0.97)."""

    first: int
    last: int
    length: int
    value: float
    """The value at `last`."""


@dataclass(frozen=True)
class RunLog:
    """Rows in the order in which they were logged, and the settings of the run where they are known.

    A key that is absent from a row was not logged; a NaN was logged and is undefined. The two are never confused.

    Example:
        RunLog(rows=[{"step": 1, "loss": 1e-9, "kl/k3": float("nan")}], config={"model": {"dtype": "float32"}})
    """

    rows: Sequence[Mapping[str, float]]
    """Mappings of canonical names, or a `Table`."""
    config: Mapping[str, Any] | None = None
    """Nested, or flat with dotted names, or both: `setting` finds either."""
    framework: str = "leadline"
    source: str = ""
    """What was read: paths, or "standard input"."""
    notes: tuple[str, ...] = ()
    """Plain sentences on how the rows were put together: duplicates, overlapping steps, a half-written line."""
    raw_names: Mapping[str, str] = field(default_factory=dict)
    """Canonical name -> what the framework calls it."""
    caveats: Mapping[str, str] = field(default_factory=dict)
    """Canonical name -> how this framework's number differs from the quantity's meaning."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Logged key without a canonical meaning -> why it has none."""
    could_log: Mapping[str, str] = field(default_factory=dict)
    """Canonical name that was not logged -> the option of this framework that turns it on."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Canonical setting -> the option that this framework has for it, known to be set or not."""
    resolutions: Mapping[str, float] = field(default_factory=dict)
    """Canonical name -> half a unit of the last printed digit, where print rounded: a 0 is only that small."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Rollouts from a dump, a bounded number: prompt, completion, reward, advantage, as far as known."""

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[float]], config: Mapping[str, Any] | None = None) -> Self:
        """A log of steps 1, 2, ... from one list of values per quantity, all of the same length."""
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return cls([{"step": step, **row} for step, row in enumerate(rows, start=1)], config)

    @cached_property
    def table(self) -> Table:
        """The rows as columns."""
        return self.rows if isinstance(self.rows, Table) else Table.from_rows(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities that any row has."""
        return tuple(name for name in self.table.columns if not name.startswith(UNREAD))

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each row in which the quantity was logged, NaN included."""
        steps, values = self.arrays(name)
        return [(int(step), value) for step, value in zip(steps.tolist(), values.tolist(), strict=True)]

    def arrays(self, name: str) -> tuple[Floats, Floats]:
        """The same as two arrays, steps and values."""
        if name == "step":
            return self.table.steps, self.table.steps
        column = self.table.columns.get(name)
        if column is None:
            return np.empty(0), np.empty(0)
        logged = column.logged
        return self.table.steps[logged], column.values[logged]

    def is_missing(self, name: str) -> bool:
        """No row has the quantity, or none has a number for it: placeholders and text are not logged values."""
        if name == "step":
            return not len(self.table)
        column = self.table.columns.get(name)
        return column is None or not column.logged.any()

    def is_undefined(self, name: str) -> bool:
        """Rows have the quantity, and it is NaN (or null) in all of them."""
        values = self.arrays(name)[1]
        return len(values) > 0 and bool(np.isnan(values).all())

    def state(self, name: str) -> State:
        """One word for all rows: missing if no row has it, dropped if it vanished, present if any row has a finite
        number, and else what the last row with the key says."""
        codes = self.table.states(name)
        had = codes[codes != MISSING]
        if not len(had):
            return State.MISSING
        if STATES[had[-1]] is State.DROPPED:
            return State.DROPPED
        return State.PRESENT if (had == PRESENT).any() else STATES[had[-1]]

    def states(self, name: str) -> list[State]:
        """The state of each row."""
        return [STATES[code] for code in self.table.states(name)]

    def raw_name(self, name: str) -> str | None:
        """What the framework calls a quantity that it logged; None if it logged none."""
        return self.raw_names.get(name) or (name if name in self.table.columns else None)

    def resolution(self, name: str) -> float:
        """Half a unit of the last digit that was printed; 0 if nothing was rounded."""
        return self.resolutions.get(name, 0.0)

    def setting(self, name: str) -> Any:
        """The value of a setting such as `model.dtype`; None if it is not known."""
        if self.config and name in self.config:
            return self.config[name]
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def option(self, name: str) -> str | None:
        """What the framework calls a setting; None if it has no such setting."""
        return self.options.get(name) or (name if self.framework == "leadline" else None)

    def since(self, step: float) -> Self:
        """The same run without the rows before a step."""
        return replace(self, rows=self.table.take(self.table.steps >= step))

    def streaks(self, name: str, broken: Callable[[float], bool], length: int) -> list[Streak]:
        """Each longest run of at least `length` values in a row for which `broken` holds; a NaN says nothing, so it
        neither counts nor ends a run."""
        steps, values = self.arrays(name)
        known = ~np.isnan(values)
        steps, values = steps[known], values[known]
        breaks = (
            np.asarray(broken(values))
            if isinstance(broken, Beyond)
            else np.fromiter((broken(value) for value in values.tolist()), np.bool_, len(values))
        )
        edges = np.flatnonzero(np.diff(np.concatenate(([False], breaks, [False])).astype(np.int8)))
        return [
            Streak(int(steps[first]), int(steps[end - 1]), int(end - first), float(values[end - 1]))
            for first, end in zip(edges[::2], edges[1::2], strict=True)
            if end - first >= length
        ]


@dataclass(frozen=True, slots=True)
class Beyond:
    """True of what lies on one side of a limit, for one number or an array."""

    limit: float
    sign: int

    def __call__(self, value: Any) -> Any:
        return value * self.sign > self.limit * self.sign


def above(limit: float) -> Callable[[float], bool]:
    """True of values greater than the limit."""
    return Beyond(limit, 1)


def below(limit: float) -> Callable[[float], bool]:
    """True of values less than the limit."""
    return Beyond(limit, -1)
