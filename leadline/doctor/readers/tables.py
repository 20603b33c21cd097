"""Tables in files: CSV, Parquet, trackio's and MLflow's databases, MLflow's directories."""

import csv
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leadline.doctor.readers.bounds import Source, decoded
from leadline.doctor.readers.json_rows import parse
from leadline.doctor.readers.printed_config import literal
from leadline.errors import LogError

MAX_DUMP_ROWS = 100_000
MAX_FILES = 2000
_UI_EXPORT = re.compile(r"(.+) - (.+?)(__MIN|__MAX)?")


def csv_rows(source: Source) -> Iterator[Mapping[str, Any]]:
    """The rows of a CSV file of any separator; `RUN - METRIC` headings of W&B's export become METRIC of that run."""
    lines = (decoded(line) for line in source.lines())
    heading = next(lines, "").lstrip("\ufeff")
    separator = max(",\t;", key=heading.count)
    names = next(csv.reader([heading], delimiter=separator), [])
    exported = [_UI_EXPORT.fullmatch(name) for name in names]
    runs = list(dict.fromkeys(match[1] for match in exported if match))
    for cells in csv.reader(lines, delimiter=separator):
        row = dict(zip(names, cells, strict=False))
        if not runs:
            yield row
        else:
            yield from _split(row, exported, runs)


def _split(
    row: Mapping[str, str], exported: list[re.Match[str] | None], runs: list[str]
) -> Iterator[Mapping[str, Any]]:
    shared = {name: cell for (name, cell), match in zip(row.items(), exported, strict=False) if not match}
    for run in runs:
        own = {
            match[2]: cell
            for cell, match in zip(row.values(), exported, strict=False)
            if match and match[1] == run and not match[3] and cell != ""
        }
        if own:
            yield {**({"run_name": run} if len(runs) > 1 else {}), **shared, **own}


def parquet_columns(source: Source) -> Mapping[str, list[Any]]:
    """The columns of a Parquet file. Raises LogError: no reader is installed, or the file is damaged."""
    try:
        import polars
    except ImportError as error:
        raise LogError(
            f"PATH is {source.name!r}, a Parquet file, but polars is not installed. It cannot be read. "
            "Run: pip install polars"
        ) from error
    try:
        frame = polars.scan_parquet(source.whole()).head(MAX_DUMP_ROWS * 10).collect()
    except polars.exceptions.PolarsError as error:
        raise LogError(
            f"PATH is {source.name!r}, but it is no whole Parquet file ({error}). It cannot be read. "
            "Export it again, or leave it out."
        ) from error
    return {name: frame.get_column(name).to_list() for name in frame.columns}


def sqlite_rows(source: Source) -> Iterator[Mapping[str, Any]]:
    """The metrics in a database of trackio or MLflow, opened read-only."""
    if source.path is None:
        return
    try:
        database = sqlite3.connect(f"{source.path.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        return
    try:
        names = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
        columns = {row[1] for row in database.execute("pragma table_info(metrics)")} if "metrics" in names else set()
        if {"run_name", "step", "metrics"} <= columns:
            yield from _trackio(database)
        elif {"key", "value", "step", "run_uuid"} <= columns:
            yield from _mlflow(database)
        else:
            source.note("The database holds no metrics of trackio or MLflow.")
    except sqlite3.Error:
        source.note("The database is damaged; what came before was read.")
    finally:
        database.close()


def _trackio(database: sqlite3.Connection) -> Iterator[Mapping[str, Any]]:
    for run, step, text in database.execute("select run_name, step, metrics from metrics order by run_name, step"):
        try:
            value = parse(text)
        except (ValueError, TypeError):
            continue
        if isinstance(value, dict):
            yield {"run_name": run, "step": step, **value}


def _mlflow(database: sqlite3.Connection) -> Iterator[Mapping[str, Any]]:
    query = "select run_uuid, key, value, step, is_nan from metrics order by run_uuid, step"
    for run, key, value, step, is_nan in database.execute(query):
        yield {"run_name": run, "step": step, key: float("nan") if is_nan else value}


def mlflow_rows(run: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a run's directory: a file for each metric, with lines of time, value and step."""
    rows: dict[int, dict[str, Any]] = {}
    for count, file in enumerate(sorted((run / "metrics").rglob("*"))):
        if count > MAX_FILES or not file.is_file():
            continue
        name = file.relative_to(run / "metrics").as_posix()
        for line in file.read_text(errors="replace").splitlines():
            parts = line.split()
            if len(parts) >= 3 and parts[2].lstrip("-").isdigit():
                rows.setdefault(int(parts[2]), {})[name] = parts[1]
    for step, row in sorted(rows.items()):
        yield {"step": step, **row}


def mlflow_params(run: Path) -> dict[str, Any]:
    """The settings of a run's directory: a file for each."""
    files = [file for file in sorted((run / "params").rglob("*"))[:MAX_FILES] if file.is_file()]
    return {
        file.relative_to(run / "params").as_posix(): literal(file.read_text(errors="replace")[:10_000])
        for file in files
    }
