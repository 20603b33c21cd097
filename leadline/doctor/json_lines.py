"""One JSON object a line, NaN and infinities included: they are written as strings, so every line is valid JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.errors import RunDirError

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(values: Mapping[str, Any]) -> bytes:
    """One line with its line break. NaN and infinities become "NaN", "Infinity" and "-Infinity", at any depth."""
    return json.dumps(_without_nan(values), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, floats restored; a half-written last line (a kill, a full disk) is left out.

    Raises RunDirError: the file cannot be read, or a line before the last is not JSON.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunDirError(
            f"The log is {str(path)!r}, but it cannot be read ({error.strerror}). There is nothing to show. "
            "Give the directory of a run that has made a step."
        ) from error
    objects = [_parse(line, number, path) for number, line in enumerate(lines, start=1)]
    try:
        return [*objects, _with_nan(json.loads(last))]
    except ValueError:
        return objects


def _parse(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = _with_nan(json.loads(line))
    except ValueError as error:
        raise RunDirError(
            f"Line {number} of {str(path)!r} is {line[:60]!r}, but a line is one JSON object. The record of the run is "
            "damaged. Delete that line to read the rest."
        ) from error
    return values


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return _FLOATS.get(value, value) if isinstance(value, str) else value
