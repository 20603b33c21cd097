"""JSON and JSONL: rows, documents with a log history, and documents that are settings."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from leadline.doctor.readers.bounds import Source

BIG = 16 << 20
_FLAT = re.compile(rb"\{[^{}]*\}")
_HISTORY = re.compile(rb'"log_history"\s*:\s*\[')


def parse(text: bytes | str) -> Any:
    """A JSON value, `NaN` and infinities allowed. Raises ValueError: not JSON, or nested too deeply."""
    return from_json(text, allow_inf_nan=True, cache_strings="keys")


def jsonl_rows(source: Source) -> Iterator[Mapping[str, Any]]:
    """The object of each line; lines that are none are passed over and counted in the notes."""
    broken = 0
    last_broken = False
    for line in source.lines():
        if not line or line.isspace():
            continue
        try:
            value = parse(line)
        except ValueError:
            broken += 1
            last_broken = True
            continue
        last_broken = False
        if isinstance(value, dict):
            yield value
    if last_broken:
        broken -= 1
        source.note("The last line is half-written and was left out.")
    if broken:
        source.note(f"{broken} lines are not JSON and were left out.")


def history_rows(source: Source) -> Iterator[Mapping[str, Any]] | None:
    """The rows of a log history, one by one, of a file that is too long to be held as objects; None of any other."""
    if source.size < BIG or not _HISTORY.search(source.head()):
        return None
    text = source.whole()
    history = _HISTORY.search(text)
    return _flat_rows(text, history.end()) if history else None


def document(source: Source) -> Any:
    """The value of a whole JSON file; the rows of its log history if it is cut off in the middle; None if neither."""
    text = source.whole()
    try:
        return parse(text)
    except ValueError:
        history = _HISTORY.search(text)
        if not history:
            return None
        source.note("The file ends in the middle or is damaged; the whole rows of its log history were read.")
        return {"log_history": list(_flat_rows(text, history.end()))}


def _flat_rows(text: bytes, start: int) -> Iterator[Mapping[str, Any]]:
    for match in _FLAT.finditer(text, start):
        try:
            value = parse(match[0])
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def rows_of(value: Any) -> list[Mapping[str, Any]] | None:
    """The rows inside a JSON document: a list of objects, a `log_history`, or lists by name; None if it has none."""
    if isinstance(value, list):
        rows: list[Mapping[str, Any]] = [row for row in value if isinstance(row, dict)]
        return rows or None
    if not isinstance(value, dict):
        return None
    for key in ("log_history", "history", "rows", "logged"):
        if isinstance(value.get(key), list):
            return rows_of(value[key])
    if value and all(_is_series(item) for item in value.values()):
        return _transposed(value)
    return None


def _is_series(item: Any) -> bool:
    if isinstance(item, list):
        return all(isinstance(number, int | float | None) for number in item)
    return isinstance(item, dict) and bool(item) and all(str(step).isdigit() for step in item)


def _transposed(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`{"loss": [0.1, ...]}` or `{"loss": {"1": 0.1}}` as rows."""
    rows: dict[int, dict[str, Any]] = {}
    for key, series in value.items():
        pairs = enumerate(series, start=1) if isinstance(series, list) else series.items()
        for step, number in pairs:
            rows.setdefault(int(step), {})[key] = number
    return [{"step": step, **row} for step, row in sorted(rows.items())]
