"""A run as the rules see it: columns instead of rows, settings and their names, and what kind of run it is."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from leadline.doctor.evidence import PERSISTENT, Evidence, Strength, when
from leadline.doctor.evidence import number as shown
from leadline.doctor.evidence import percent as as_percent
from leadline.doctor.run_log import UNREAD, RunLog, Streak
from leadline.doctor.series import Floats, Mask, Series
from leadline.doctor.wording import worded
from leadline.metrics import find

T = TypeVar("T")


class View:
    """Reads a run lazily and remembers what it read.

    Example: View(RunLog.from_columns({"loss": [0.0, 0.1]}))["loss"].median
    """

    def __init__(self, run: RunLog, *, live: bool = False) -> None:
        self.run = run
        self.live = live
        self._columns: dict[str, Series] = {}
        self._answers: dict[str, Any] = {}

    def remembered(self, question: str, answer: Callable[["View"], T]) -> T:
        """The answer to a question that many rules ask, computed once."""
        if question not in self._answers:
            self._answers[question] = answer(self)
        known: T = self._answers[question]
        return known

    # --- quantities

    def __getitem__(self, name: str) -> Series:
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def first_of(self, *names: str) -> Series:
        """The first of these that was logged; empty if none was."""
        return next((self[name] for name in names if len(self[name])), self[names[0]])

    def has(self, *names: str) -> bool:
        """One of these was logged."""
        return any(len(self[name]) for name in names)

    def family(self, pattern: str) -> dict[str, Series]:
        """Logged quantities whose whole name matches, e.g. r"reward/[^/]+/mean"."""
        return {name: self[name] for name in _named(self.names, pattern)}

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities that some row has."""
        return self.run.names

    @property
    def steps(self) -> Floats:
        return self.run.table.steps

    @property
    def rows(self) -> int:
        return len(self.run.table)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]) if len(self.steps) else 0

    def _read(self, name: str) -> Series:
        stored = f"{UNREAD}{name}" if f"{UNREAD}{name}" in self.run.table.columns else name
        steps, values = self.run.arrays(stored)
        return Series(name, steps.astype(np.int64), values)

    # --- evidence

    def lasting(
        self,
        series: Series | str,
        broken: Callable[[Floats], Mask],
        limit: float,
        note: str,
        *,
        rows: int = PERSISTENT,
        strength: Strength = "strong",
    ) -> list[Evidence]:
        """One item per stretch of rows that break a limit for long enough. The note is a format string that may use
        {value}, {when} and {limit}, or {percent} for a share.

        Long enough: `rows` in a row; in a log of hundreds of rows, 2 % of it, or `rows` at its very end; in a log that
        is shorter than `rows`, all of it (a live run waits instead).
        """
        taken = self[series] if isinstance(series, str) else series
        known = taken.known
        if not len(known):
            return []
        least = rows if self.live else min(rows, len(known))
        long = max(least, min(50, math.ceil(0.02 * len(known))))
        return [
            self._evidence(known.name, streak, limit, note, strength)
            for streak in known.streaks(broken(known.values), long, tail=least)
        ]

    def events(
        self,
        series: Series | str,
        broken: Callable[[Floats], Mask],
        limit: float,
        note: str,
        strength: Strength = "strong",
    ) -> list[Evidence]:
        """One item per stretch of rows that break a limit, however short."""
        taken = self[series] if isinstance(series, str) else series
        if not len(taken):
            return []
        streaks = taken.streaks(broken(taken.values), 1)
        return [self._evidence(taken.name, streak, limit, note, strength) for streak in streaks]

    def fact(
        self,
        series: Series,
        value: float,
        limit: float,
        note: str,
        strength: Strength = "strong",
        since: int | None = None,
    ) -> Evidence:
        """An item about the series as a whole, dated at its last row. {value}, {percent} and {limit} may be used in the note."""
        text = note.format(value=shown(value), limit=shown(limit), percent=as_percent(value))
        return Evidence(series.name, series.step, value, limit, text, strength, since)

    def chosen(self, setting: str, limit: float, note: str, strength: Strength = "weak") -> Evidence:
        """An item about a setting. {value} and {option} may be used in the note."""
        value = self.setting(setting)
        text = note.format(value=value, option=self.option(setting))
        return Evidence(setting, 0, _as_float(value), limit, text, strength)

    def _evidence(self, name: str, streak: Streak, limit: float, note: str, strength: Strength) -> Evidence:
        text = note.format(
            value=shown(streak.value),
            percent=f"{100 * streak.value:.3g} %",
            when=when(streak),
            limit=shown(limit),
        )
        return Evidence(name, streak.last, streak.value, limit, text, strength, streak.first)

    # --- measurements: numbers of a probe, an ablation or a dump that no trainer logs by itself

    def measured(self, *patterns: str) -> Iterator[tuple[str, Series]]:
        """Keys that are no canonical quantity and match one of the patterns (searched, lower case, `_`, `/` and `-`
        read as spaces)."""
        for name in self._foreign:
            words = re.sub(r"[_/.\-]+", " ", name.lower())
            if any(re.search(pattern, words) for pattern in patterns):
                yield name, self[name]

    @cached_property
    def _foreign(self) -> tuple[str, ...]:
        return tuple(
            name.removeprefix(UNREAD)
            for name in self.run.table.columns
            if name.startswith(UNREAD) or (name != "step" and find(name) is None)
        )

    # --- settings

    @property
    def framework(self) -> str:
        return self.run.framework

    def setting(self, name: str, default: Any = None) -> Any:
        """The value of a canonical setting, or the default if it is not known."""
        value = self.run.setting(name)
        return default if value is None else value

    def number(self, name: str) -> float:
        """The same as a number; NaN if it is not known or none."""
        return _as_float(self.run.setting(name))

    def option(self, name: str) -> str:
        """What the run's framework calls a setting; our name if it has none."""
        return self.run.option(name) or name

    def raw(self, pattern: str) -> Iterator[tuple[str, Any]]:
        """Settings by the framework's own name: (name, value) of each that matches (searched, lower case)."""
        for index in _matching(self._names_in_lower_case, pattern):
            yield self._flat[index]

    def says(self, pattern: str) -> str | None:
        """The first setting whose name or text matches (searched, lower case), as `name = value`; None if none does.
        A setting that is off (False, 0, None, "none") says nothing by its name alone."""
        for index in _matching(self._said, pattern):
            name, value = self._flat[index]
            return f"{name} = {value}"
        return None

    @cached_property
    def _flat(self) -> tuple[tuple[str, Any], ...]:
        return tuple(_flatten(self.run.config or {}))

    @cached_property
    def _names_in_lower_case(self) -> tuple[str, ...]:
        return tuple(name.lower() for name, _ in self._flat)

    @cached_property
    def _said(self) -> tuple[str, ...]:
        return tuple(_said(name, value) for name, value in self._flat)

    def worded(self, text: str) -> str:
        """The text with our settings (in backticks) replaced by those of the run's framework."""
        return worded(text, self.run.option)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _said(name: str, value: Any) -> str:
    off = not value or value in ("none", "None", "null", "false", "False", "off")
    return str(value).lower() if off else f"{name.lower()} = {str(value).lower()}"


@lru_cache(maxsize=256)
def _named(names: tuple[str, ...], pattern: str) -> tuple[str, ...]:
    """Those that match as a whole. A live run asks it of the same names at every step."""
    return tuple(name for name in names if re.fullmatch(pattern, name))


@lru_cache(maxsize=1024)
def _matching(texts: tuple[str, ...], pattern: str) -> tuple[int, ...]:
    """Where the pattern is found. A live run asks the same of the same settings at every step, so it is remembered."""
    return tuple(index for index, text in enumerate(texts) if re.search(pattern, text))
