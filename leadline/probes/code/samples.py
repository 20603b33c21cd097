"""Real completions with their prompts: from a run directory, a parquet of rollouts, or JSONL."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.errors import DataError

COMPLETION = ("completion", "response", "text", "output", "completions")
PROMPT = ("prompt", "question", "query", "input")
GOLD = ("answer", "ground_truth", "solution", "target", "label", "gold")


@dataclass(frozen=True, slots=True)
class RealSample:
    """A completion that a model wrote."""

    prompt: str
    completion: str
    gold: str | None
    reward: float | None
    """What it got when it was sampled."""
    columns: Mapping[str, Any]


def read_samples(path: Path) -> list[RealSample]:
    """Raises DataError: no such file, no completions in it."""
    rows = list(_rows(path))
    samples = [_sample(row) for row in rows if _first(row, COMPLETION) is not None]
    if not samples:
        raise DataError(
            f"--samples is {str(path)!r}, but no row has a completion (columns: "
            f"{', '.join(rows[0]) if rows else 'none'}). Nothing could be scored. Name the column one of "
            f"{', '.join(COMPLETION)}."
        )
    return samples


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        files = sorted((path / "rollouts" if (path / "rollouts").is_dir() else path).glob("*.parquet"))
    else:
        files = [path]
    if not files or not all(file.is_file() for file in files):
        raise DataError(
            f"--samples is {str(path)!r}, but there is no such file, nor a run with rollouts. Nothing could be scored. "
            "Name a run directory, a .parquet or a .jsonl file."
        )
    for file in files:
        yield from _parquet(file) if file.suffix == ".parquet" else _jsonl(file)


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import polars

    yield from polars.read_parquet(path).iter_rows(named=True)


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"--samples is {str(path)!r}, but line {number} is not JSON ({error}). It could not be read. "
                "Write one object a line."
            ) from error
        if isinstance(row, dict):
            yield row


def _sample(row: Mapping[str, Any]) -> RealSample:
    reward, gold = row.get("reward"), _first(row, GOLD)
    return RealSample(
        prompt=_text(_first(row, PROMPT) or ""),
        completion=_text(_first(row, COMPLETION)),
        gold=None if gold is None else str(gold),
        reward=float(reward) if isinstance(reward, int | float) else None,
        columns=dict(row),
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: Any) -> str:
    """Of a text, or of a list of messages."""
    if isinstance(value, list):
        return "".join(
            str(message.get("content", "")) if isinstance(message, dict) else str(message) for message in value
        )
    return str(value)
