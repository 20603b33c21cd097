"""From raw columns to a run in canonical quantities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from leadline.doctor.readers.collect import RUN_KEYS, Collected
from leadline.doctor.readers.frameworks import LEADLINE, Framework, Key
from leadline.doctor.readers.order import Ordered, runs_of
from leadline.doctor.readers.recognise import find_key, is_bookkeeping
from leadline.doctor.run_log import UNREAD
from leadline.doctor.table import LOGGED, MISSING, PLACEHOLDER, PRESENT, STRING, Column, Floats, Table
from leadline.metrics import find

SUMMED = ("reward/zero_std_groups", "rollout/filtered_groups")
"""Quantities that a framework splits over several keys, one for each reward value."""
FIXED_FORMAT = ("verl", "skyrl", "prime_rl", "nemo_rl", "open_instruct")
"""Frameworks whose console prints a fixed number of decimals."""
MAX_ROUNDED = 4
"""Decimals up to which a printed 0 may be a small number."""
NEVER_ZERO = ("optimizer/learning_rate",)
"""Quantities whose printed 0 was rounded away and says nothing."""
MAX_MEASUREMENTS, MAX_CELLS = 256, 20_000_000
"""Keys without a canonical meaning whose numbers are kept, and the numbers kept in all."""
BOOKKEEPING = "bookkeeping"
NO_MEANING = "no canonical meaning is known"
NO_NUMBER = "text, not a number"


@dataclass
class Assembled:
    """One source in canonical quantities: its runs, and what became of each key."""

    runs: list[Ordered]
    raw_names: dict[str, str] = field(default_factory=dict)
    caveats: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    resolutions: dict[str, float] = field(default_factory=dict)


def assemble(collected: Collected, framework: Framework) -> Assembled:
    """The runs of a source, read by a framework's table."""
    result = Assembled([])
    framework = LEADLINE if collected.canonical else framework
    different = _differences(collected, framework)
    columns: dict[str, Column] = {}
    for key, target in _targets(collected, framework, different, result):
        column = _converted(collected.take(key), target)
        if (column.codes == STRING).all():
            result.unread[key] = NO_NUMBER
            continue
        if target.name in columns:
            columns[target.name] = _joined(columns[target.name], column, target.name in SUMMED)
            continue
        columns[target.name] = column
        result.raw_names[target.name] = key
        if target.caveat:
            result.caveats[target.name] = target.caveat
        resolution = _resolution(collected, framework, key, column)
        if resolution:
            result.resolutions[target.name] = resolution * abs(target.factor)
    _drop_rounded(columns, result.resolutions)
    columns |= _measurements(collected, result.unread)
    result.runs = runs_of(Table(_steps(collected, framework), columns), collected.runs)
    return result


def _measurements(collected: Collected, unread: Mapping[str, str]) -> dict[str, Column]:
    """Numbers without a canonical meaning, kept under `unread/KEY`: a probe or a person may have measured them."""
    most = min(MAX_MEASUREMENTS, MAX_CELLS // max(collected.length, 1))
    keys = [key for key, why in unread.items() if why == NO_MEANING][:most]
    columns = {f"{UNREAD}{key}": collected.column(key) for key in keys}
    return {name: column for name, column in columns.items() if (column.codes == PRESENT).any()}


def _targets(
    collected: Collected, framework: Framework, different: dict[str, str | Key], result: Assembled
) -> list[tuple[str, Key]]:
    """Keys with where they go, in the order of the framework's table: the first of several is believed."""
    ranks = {key: rank for rank, key in enumerate(framework.keys)}
    found = []
    for key in collected.keys:
        target = find_key(framework, key, different)
        if target is None:
            own = key in RUN_KEYS or is_bookkeeping(framework, key)
            result.unread[key] = BOOKKEEPING if own else NO_MEANING
        elif find(target.name) is not None:
            found.append((key, target))
        else:
            result.unread[key] = NO_MEANING
    result.unread = dict(sorted(result.unread.items()))
    return sorted(found, key=lambda pair: (ranks.get(_bare(pair[0], framework), len(ranks)), pair[0]))


def _bare(key: str, framework: Framework) -> str:
    if key in framework.keys:
        return key
    return next((key[len(p) :] for p in framework.prefixes if key.startswith(p)), key)


def _differences(collected: Collected, framework: Framework) -> dict[str, str | Key]:
    if framework.refine is None:
        return {}
    bare = frozenset(_bare(key, framework) for key in collected.keys)
    different = dict(framework.refine(bare, collected.column))
    return {**different, **{f"{p}{key}": target for p in framework.prefixes for key, target in different.items()}}


def _converted(column: Column, key: Key) -> Column:
    if key.factor == 1.0 and key.offset == 0.0 and key.placeholder is None:
        return column
    codes = column.codes
    if key.placeholder is not None:
        codes = np.where((codes == PRESENT) & (column.values == key.placeholder), PLACEHOLDER, codes).astype(np.uint8)
    values = np.where(codes == PLACEHOLDER, np.nan, column.values * key.factor + key.offset)
    return Column(values, codes)


def _joined(first: Column, second: Column, summed: bool) -> Column:
    """The first where it was logged, else the second; or their sum."""
    if summed:
        both = np.isin(first.codes, LOGGED) & np.isin(second.codes, LOGGED)
        values = np.where(
            both, first.values + second.values, np.where(first.codes == MISSING, second.values, first.values)
        )
        return Column(values, np.where(first.codes == MISSING, second.codes, first.codes).astype(np.uint8))
    absent = (first.codes == MISSING) | (first.codes == STRING) | (first.codes == PLACEHOLDER)
    usable = absent & (second.codes != MISSING)
    return Column(
        np.where(usable, second.values, first.values), np.where(usable, second.codes, first.codes).astype(np.uint8)
    )


def _steps(collected: Collected, framework: Framework) -> Floats:
    """The number of each row: its own, else that of the row before it, else its place from 1."""
    if collected.length == 0:
        return np.empty(0)
    if framework.name in ("slime", "miles"):
        steps = _two_axes(collected)
        if steps is not None:
            return _filled(steps)
    steps = np.full(collected.length, np.nan)
    for key in (*framework.steps, "step"):
        if key in collected.chunks:
            column = collected.column(key)
            steps = np.where(np.isnan(steps) & (column.codes == PRESENT), column.values, steps)
    return _filled(steps)


def _two_axes(collected: Collected) -> Floats | None:
    """slime counts optimizer steps and rollouts apart: a rollout stands at the first step that it feeds."""
    if "train/step" not in collected.chunks or "rollout/step" not in collected.chunks:
        return None
    steps, rollouts = collected.column("train/step").values, collected.column("rollout/step").values
    per_rollout = 1
    if not (np.isnan(steps).all() or np.isnan(rollouts).all()):
        per_rollout = max(1, round((np.nanmax(steps) + 1) / (np.nanmax(rollouts) + 1)))
    return np.where(np.isnan(steps), rollouts * per_rollout, steps)


def _filled(steps: Floats) -> Floats:
    known = ~np.isnan(steps)
    if known.all():
        return steps
    if not known.any():
        return np.arange(1.0, len(steps) + 1)
    last = np.maximum.accumulate(np.where(known, np.arange(len(steps)), -1))
    first = steps[known][0]
    return np.where(last >= 0, steps[np.maximum(last, 0)], first)


def _resolution(collected: Collected, framework: Framework, key: str, column: Column) -> float:
    """Half a unit of the last printed digit, where print rounds."""
    digits = collected.decimals.get(key)
    if digits is not None and framework.name in FIXED_FORMAT:
        most = max(collected.decimals.values()) if framework.name == "verl" else digits
        return 0.5 * 10.0**-digits if 0 < most <= MAX_ROUNDED else 0.0
    if framework.name == "trl" and _bare(key, framework) == "loss":
        numbers = column.values[column.codes == PRESENT]
        return 0.5e-4 if len(numbers) and np.array_equal(np.round(numbers, 4), numbers) else 0.0
    return 0.0


def _drop_rounded(columns: Mapping[str, Column], resolutions: Mapping[str, float]) -> None:
    for name in NEVER_ZERO:
        if name in columns and resolutions.get(name):
            column = columns[name]
            zero = (column.codes == PRESENT) & (column.values == 0.0)
            column.codes[zero] = STRING
            column.values[zero] = np.nan


def combined(tables: Sequence[Table]) -> Table:
    """One table of several sources of the same run; of two columns the one of the earlier table is believed."""
    if len(tables) == 1:
        there = {name: column for name, column in tables[0].columns.items() if (column.codes != MISSING).any()}
        return Table(tables[0].steps, there)
    steps = np.unique(np.concatenate([table.steps for table in tables]))
    columns: dict[str, Column] = {}
    for table in tables:
        place = np.searchsorted(steps, table.steps)
        for name, column in table.columns.items():
            values = np.full(len(steps), np.nan)
            codes = np.full(len(steps), MISSING, np.uint8)
            values[place], codes[place] = column.values, column.codes
            spread = Column(values, codes)
            columns[name] = _joined(columns[name], spread, False) if name in columns else spread
    return Table(steps, columns)


def by_estimator(assembled: Assembled, estimator: str | None) -> None:
    """Puts the KL to the reference under the estimator that the settings name."""
    wanted = f"kl/{estimator}"
    if find(wanted) is None:
        return
    for name in ("kl/reference", "kl/k3"):
        if name != wanted and name in assembled.raw_names and wanted not in assembled.raw_names:
            for run in assembled.runs:
                if name in run.table.columns:
                    run.table.columns[wanted] = run.table.columns.pop(name)
            assembled.raw_names[wanted] = assembled.raw_names.pop(name)
            assembled.caveats.pop(name, None)
            return


__all__ = ["BOOKKEEPING", "Assembled", "assemble", "by_estimator", "combined"]
