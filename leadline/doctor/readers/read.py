"""From what a person names to the runs in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from leadline.doctor.readers.assemble import BOOKKEEPING, Assembled, assemble, by_estimator, combined
from leadline.doctor.readers.bounds import source_of
from leadline.doctor.readers.collect import Collected, Collector
from leadline.doctor.readers.configs import canonical_settings, framework_of, read_config
from leadline.doctor.readers.find import Found, find, latest_states
from leadline.doctor.readers.frameworks import UNKNOWN, Framework
from leadline.doctor.readers.loading import load
from leadline.doctor.readers.recognise import from_keys, from_words, named, narrowed
from leadline.doctor.readers.tables import mlflow_params, mlflow_rows
from leadline.doctor.readers.text_rows import is_metric
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import LOGGED, Table
from leadline.errors import LogError

MAX_DISAGREEMENT = 0.5
"""Two logs whose common values differ at more than this share of the common steps are two runs, not two copies."""


@dataclass
class _Read:
    """What was found for one run: sources with rows, settings, and notes of the reading."""

    name: str
    logs: list[Collected] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_runs(
    paths: Sequence[Path | TextIO], *, framework: str | None = None, config_paths: Sequence[Path] = ()
) -> list[RunLog]:
    """The runs in files, directories and text streams, in canonical quantities, each with the settings found for it.

    Settings in `config_paths`, and in files among `paths` that hold nothing else, are those of every run. A run that
    has settings and no rows is one that did not start yet. Raises LogError: nothing readable there, or an unknown
    framework.
    """
    writer = named(framework) if framework else None
    shared: dict[str, Any] = {}
    for config in config_paths:
        shared.update(_required_config(config))
    reads: list[_Read] = []
    for path in paths:
        if isinstance(path, Path) and path.is_dir():
            reads += _inherited([_read_found(found, writer) for found in find(path)])
        else:
            _read_one(path, writer, reads, shared)
    if shared and not reads:
        reads = [_Read(", ".join(str(path) for path in (*paths, *config_paths)))]
    if not reads:
        raise _nothing(paths)
    return [run for read in reads for run in _runs(read, shared, writer)]


def _inherited(reads: Sequence[_Read]) -> list[_Read]:
    """The runs that have rows, each with the settings that stand above it; without any, what has settings."""
    logged = [read for read in reads if read.logs]
    for read in logged:
        for above in reads:
            if not above.logs and Path(above.name) in Path(read.name).parents:
                read.options = {**above.options, **read.options}
    return logged or [read for read in reads if read.options]


def _required_config(path: Path) -> Mapping[str, Any]:
    settings = read_config(source_of(path))
    if not settings:
        raise LogError(
            f"--config is {str(path)!r}, but no settings can be read there. The log would be judged without them. "
            "Give JSON, YAML, TOML, a command line or training_args.bin."
        )
    return _unwrapped(settings)


def _read_one(path: Path | TextIO, writer: Framework | None, reads: list[_Read], shared: dict[str, Any]) -> None:
    """One file: a log becomes a run of its own, settings become those of every run."""
    source = source_of(path)
    loaded = load(source, writer)
    if isinstance(loaded, Collected):
        read = _Read(source.name, [loaded] if loaded.length else [], loaded.options, source.notes)
        if loaded.length or loaded.options:
            reads.append(read)
    elif loaded:
        shared.update(_unwrapped(loaded))


def _read_found(found: Found, writer: Framework | None) -> _Read:
    """All files of one run; what cannot be read is passed over with a note."""
    read = _Read(str(found.root))
    for path in latest_states(found.files):
        try:
            source = source_of(path)
            loaded = load(source, writer, quick=True)
        except LogError as error:
            read.notes.append(f"{path.name} was left out: {error}")
            continue
        read.notes += [f"{path.name}: {note}" for note in source.notes] if loaded else []
        if isinstance(loaded, Collected):
            counted = "step" in loaded.keys  # numbers by step that no table knows: a probe's, or a person's
            if loaded.length and (loaded.canonical or counted or any(is_metric(key) for key in loaded.keys)):
                read.logs.append(loaded)
            read.options.update(loaded.options)
        elif loaded:
            read.options.update(_unwrapped(loaded))
    for directory in found.mlflow:
        collector = Collector(str(directory))
        collector.extend(mlflow_rows(directory))
        read.logs.append(collector.finish())
        read.options.update(mlflow_params(directory))
    read.logs.sort(key=lambda log: (log.rank, log.source))
    return read


def _unwrapped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what W&B puts around each."""
    return {
        key: value["value"]
        if isinstance(value, Mapping) and "value" in value and set(value) <= {"value", "desc"}
        else value
        for key, value in options.items()
        if key not in ("_wandb", "wandb_version")
    }


def _runs(read: _Read, shared: Mapping[str, Any], writer: Framework | None) -> list[RunLog]:
    options = {**read.options, **shared}
    framework = writer or _framework(read, options)
    settings = canonical_settings(options, framework) if options else {}
    assembled = [assemble(log, framework) for log in read.logs]
    estimator = settings.get("objective.kl_estimator")
    for part in assembled:
        by_estimator(part, estimator if isinstance(estimator, str) else None)
    groups = _grouped(assembled) or [[]]
    return [_run_log(read, group, settings, framework) for group in groups]


def _framework(read: _Read, options: Mapping[str, Any]) -> Framework:
    """Named by the settings, else told by the form of the lines, else by the keys, else by the options."""
    hint = options.get("framework")
    named_there = from_words(hint) if isinstance(hint, str) else None
    if named_there is not None:
        return named_there
    printed = next((log.framework for log in read.logs if log.framework), None)
    if printed:
        return narrowed(named(printed), [key for log in read.logs for key in log.keys])
    keys = [key for log in read.logs for key in log.keys]
    by_keys = narrowed(from_keys(keys), keys) if keys else UNKNOWN
    return by_keys if by_keys is not UNKNOWN else framework_of(options) or UNKNOWN


Group = list[tuple[Assembled, Table, tuple[str, ...]]]


def _grouped(parts: Sequence[Assembled]) -> list[Group]:
    """Sources that hold one run each are that run, unless they contradict each other; one of several runs is split."""
    groups: list[Group] = []
    joint: Group = []
    for part in parts:
        if len(part.runs) > 1:
            groups += [[(part, run.table, run.notes)] for run in part.runs]
            continue
        (run,) = part.runs
        if joint and _contradicts(joint[0][1], run.table):
            groups.append([(part, run.table, run.notes)])
        else:
            joint.append((part, run.table, run.notes))
    return [joint, *groups] if joint else groups


def _contradicts(first: Table, second: Table) -> bool:
    """Most of what both logged at the same steps is different."""
    _, left, right = np.intersect1d(first.steps, second.steps, return_indices=True)
    names = [n for n in first.columns if n in second.columns and not n.startswith(("time/", "throughput/", "memory/"))]
    compared = differing = 0
    for name in names:
        a, b = first.columns[name], second.columns[name]
        both = np.isin(a.codes[left], LOGGED) & np.isin(b.codes[right], LOGGED)
        compared += int(both.sum())
        close = np.isclose(a.values[left], b.values[right], rtol=1e-3, atol=1e-6, equal_nan=True)
        differing += int((both & ~close).sum())
    return compared > 0 and differing > MAX_DISAGREEMENT * compared


def _run_log(read: _Read, group: Group, settings: Mapping[str, Any], framework: Framework) -> RunLog:
    table = combined([table for _, table, _ in group]) if group else Table(np.empty(0), {})
    parts = [part for part, _, _ in group]
    logged = {name for name, column in table.columns.items() if column.logged.any()}
    return RunLog(
        rows=table,
        config=dict(settings) if settings else None,
        framework=framework.name,
        source=read.name,
        notes=tuple(dict.fromkeys([*read.notes, *(note for log in read.logs for note in log.notes), *_notes(group)])),
        raw_names=_first(part.raw_names for part in parts),
        caveats={name: text for name, text in _first(part.caveats for part in parts).items() if name in table.columns},
        unread={k: why for k, why in _first(part.unread for part in parts).items() if why != BOOKKEEPING},
        could_log={name: option for name, option in framework.could_log.items() if name not in logged},
        options=framework.options,
        resolutions=_first(part.resolutions for part in parts),
        samples=tuple(sample for log in read.logs for sample in log.samples),
    )


def _notes(group: Group) -> list[str]:
    return [note for _, _, notes in group for note in notes]


def _first(mappings: Any) -> dict[str, Any]:
    """Of several mappings, the first that has a name is believed."""
    joined: dict[str, Any] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            joined.setdefault(name, value)
    return joined


def _nothing(paths: Sequence[Path | TextIO]) -> LogError:
    names = ", ".join(str(path) if isinstance(path, Path) else "standard input" for path in paths)
    return LogError(
        f"PATH is {names or 'not given'}, but no metrics and no settings of a run were found there. There is nothing to "
        "examine. Give a run directory, a log with metrics (console text, JSON, JSONL, CSV, Parquet, TensorBoard, W&B), "
        "or a config."
    )
