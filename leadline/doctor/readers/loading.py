"""One file: what it is, and its rows or settings."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from leadline.doctor.readers.blackbox import blackbox_row
from leadline.doctor.readers.bounds import Source
from leadline.doctor.readers.collect import HOISTED, Collected, Collector
from leadline.doctor.readers.configs import read_config
from leadline.doctor.readers.dumps import is_rollout_dump, is_token_dump, rollout_dump, token_dump_rows, writer_of
from leadline.doctor.readers.frameworks import Framework
from leadline.doctor.readers.json_rows import document, history_rows, jsonl_rows, parse, rows_of
from leadline.doctor.readers.sniff import Kind, kind_of
from leadline.doctor.readers.tables import csv_rows, parquet_columns, sqlite_rows
from leadline.doctor.readers.tensorboard import event_rows
from leadline.doctor.readers.text_rows import is_metric, read_text
from leadline.doctor.readers.wandb_file import wandb_rows
from leadline.errors import LogError

RANKS = {Kind.JSONL: 0, Kind.JSON: 0, Kind.CSV: 1, Kind.WANDB: 2, Kind.TENSORBOARD: 3, Kind.SQLITE: 3, Kind.TEXT: 4}
DUMP_RANK = 5
MAX_QUICK_TEXT = 256 << 20
"""In a directory, text files over this size are passed over unless they are named."""
MODEL_CONFIG = ("architectures", "transformers_version")


def load(
    source: Source, writer: Framework | None = None, *, quick: bool = False
) -> Collected | Mapping[str, Any] | None:
    """Rows as a `Collected`, settings as a mapping, or None for a file with neither.

    `quick`: for a file that nobody named, which may be anything. Raises LogError: it is a kind that cannot be read, or is
    a damaged `training_args.bin`.
    """
    if Path(source.name).name != "training_args.bin":
        return _found(source, writer, quick)
    with suppress(LogError):  # whatever else it looks like
        if (found := _found(source, writer, quick)) is not None:
            return found
    raise LogError(
        f"PATH is {source.name!r}, but the file is damaged. The log would be judged without the settings in it. Give "
        "them with --config FILE."
    )


def _found(source: Source, writer: Framework | None, quick: bool) -> Collected | Mapping[str, Any] | None:
    head = source.head()
    kind = kind_of(head)
    if kind is Kind.EMPTY:
        return None
    if kind is Kind.BINARY:
        if quick:
            return None
        raise LogError(
            f"PATH is {source.name!r}, but it is a binary file of a kind that is not known. It cannot be read. Give "
            "text, JSON, CSV, Parquet, TensorBoard events, a .wandb file, or training_args.bin."
        )
    if kind is Kind.CONFIG:
        return _settings(source)
    if kind is Kind.SAFETENSORS:
        return _blackbox(source)
    if kind is Kind.JSON:
        return _json(source, quick)
    if kind is Kind.JSONL:
        return _jsonl(source, head)
    if kind is Kind.PARQUET:
        return _parquet(source)
    if kind is Kind.TEXT:
        return _text(source, writer, quick)
    return _ranked(_collected(source, kind), kind)


def _collected(source: Source, kind: Kind) -> Collected:
    collector = Collector(source.name)
    if kind is Kind.CSV:
        collector.extend(csv_rows(source))
    elif kind is Kind.TENSORBOARD:
        collector.extend(event_rows(source))
    elif kind is Kind.SQLITE:
        collector.extend(sqlite_rows(source))
    else:
        collector.extend(wandb_rows(source, collector.collected.options))
    return collector.finish()


def _ranked(collected: Collected, kind: Kind) -> Collected:
    collected.rank = RANKS[kind]
    return collected


def _settings(source: Source) -> Mapping[str, Any] | None:
    settings = read_config(source)
    if settings and all(key in settings for key in MODEL_CONFIG):
        return None  # the shape of a model, not the settings of a run
    return settings


def _json(source: Source, quick: bool) -> Collected | Mapping[str, Any] | None:
    history = history_rows(source)
    value = None if history else document(source)
    rows = history or rows_of(value)
    if rows is not None:
        collector = Collector(source.name)
        collector.extend(rows)
        return _ranked(collector.finish(), Kind.JSON)
    if isinstance(value, dict):
        if all(key in value for key in MODEL_CONFIG):
            return None
        return _row(source, value) if _is_row(value) else value
    if value is None:
        return None if quick else _text(source, None, quick)
    return None


def _is_row(value: Mapping[str, Any]) -> bool:
    """A single JSON object that is a row of metrics rather than settings."""
    metrics = sum(is_metric(key) for key in value)
    return metrics >= 2 and metrics * 2 > len(value) and "framework" not in value


def _row(source: Source, value: Mapping[str, Any]) -> Collected:
    collector = Collector(source.name)
    collector.add(value)
    return _ranked(collector.finish(), Kind.JSON)


def _jsonl(source: Source, head: bytes) -> Collected | Mapping[str, Any] | None:
    try:
        first = parse(head.splitlines()[0])
    except ValueError:
        first = {}
    if is_token_dump(first):
        collector = Collector(source.name)
        collector.extend(token_dump_rows(source))
        return _dumped(collector.finish(), writer_of(first))
    if b"\n" not in head.strip() and isinstance(first, dict):
        if rows_of(first) is not None:
            return _json(source, True)
        if not _is_row(first) and "step" not in first and not any(isinstance(first.get(key), dict) for key in HOISTED):
            return None if all(key in first for key in MODEL_CONFIG) else first
    collector = Collector(source.name)
    collector.extend(jsonl_rows(source))
    return _ranked(collector.finish(), Kind.JSONL)


def _parquet(source: Source) -> Collected:
    columns = parquet_columns(source)
    collector = Collector(source.name)
    if is_rollout_dump(list(columns)):
        rows, samples = rollout_dump(columns, source.name)
        collector.extend(rows)
        collector.collected.samples.extend(samples)
        return _dumped(collector.finish(), "leadline" if "fate" in columns else "trl")
    names = list(columns)
    collector.extend(dict(zip(names, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    return _ranked(collector.finish(), Kind.CSV)


def _blackbox(source: Source) -> Collected | None:
    row = blackbox_row(source)
    if row is None:
        return None
    collector = Collector(source.name)
    collector.add(row)
    return _dumped(collector.finish(), "leadline")


def _dumped(collected: Collected, framework: str | None) -> Collected:
    collected.rank, collected.canonical, collected.framework = DUMP_RANK, True, framework
    return collected


def _text(source: Source, writer: Framework | None, quick: bool) -> Collected | Mapping[str, Any] | None:
    if quick and source.size > MAX_QUICK_TEXT:
        source.note("A text of this size is read only when it is named.")
        return None
    collected = _ranked(read_text(source, writer), Kind.TEXT)
    if not collected.length and not collected.options:
        return _settings(source)
    return collected
