"""Dataset rows by the name of their source: a `.jsonl` file, a Hugging Face dataset, a reasoning-gym task, a function."""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from leadline.errors import DataError
from leadline.functions import function_named
from leadline.settings.data import Data

Row = Mapping[str, Any]

REASONING_GYM = "reasoning_gym:"

FUNCTION = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""`file.py:function` or `package.module:function`."""


def load_rows(data: Data, source: str, split: str, *, size: int, seed: int) -> list[Row]:
    """All rows of `source`, which is `data.source` or `data.eval_source`; at least one.

    `data.params` goes to sources of the same kind as `data.source`. `size` and `seed` are for functions, which are called
    with both, and for reasoning-gym, whose rows have the columns `data.prompt_column` (the question), `answer`, `entry`
    (all that the task's scorer needs) and `task`. Raises DataError.
    """
    params = data.params if _kind(source) == _kind(data.source) else {}
    if source.startswith(REASONING_GYM):
        rows = _reasoning_gym(source.removeprefix(REASONING_GYM), data.prompt_column, size, seed, params)
    elif FUNCTION.fullmatch(source):
        rows = _called(source, size, seed, params)
    elif source.endswith(".jsonl"):
        rows = _jsonl(Path(source), params)
    else:
        rows = _hugging_face(source, split, params)
    if not rows:
        raise DataError(f"The source is {source!r}, but it has no rows. There is nothing to train on. Name another.")
    return rows


def _kind(source: str) -> str:
    if source.startswith(REASONING_GYM):
        return "reasoning_gym"
    if FUNCTION.fullmatch(source):
        return "function"
    return "jsonl" if source.endswith(".jsonl") else "hugging_face"


def _called(source: str, size: int, seed: int, params: Mapping[str, Any]) -> list[Row]:
    """What the function returns: an iterable of rows."""
    try:
        function = function_named(source)
    except ImportError as error:
        raise DataError(
            f"The source is {source!r}, but {error}. There is nothing to train on. Mend the import, or the name."
        ) from error
    try:
        rows = list(function(size=size, seed=seed, **params))
    except Exception as error:  # user code runs here: it can raise anything
        raise DataError(
            f"The source is {source!r}, but called with size, seed and data.params = {dict(params)} it raises "
            f"{type(error).__name__}: {error}. There is nothing to train on. Mend the function, or data.params."
        ) from error
    odd = next((row for row in rows if not isinstance(row, Mapping)), None)
    if odd is not None:
        raise DataError(
            f"The source is {source!r}, but among its rows is a {type(odd).__name__}. It has no columns. Let the function "
            "return dicts."
        )
    return rows


def _jsonl(path: Path, params: Mapping[str, Any]) -> list[Row]:
    if params:
        raise DataError(f"data.params is {dict(params)}, but {str(path)!r} takes none. It would be ignored. Remove it.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"The source is {str(path)!r}, but it cannot be read: {error}. There is nothing to train on. "
            "Give the path of a .jsonl file."
        ) from error
    return [_json_object(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _json_object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is no JSON: {error}. The row cannot be read. Mend that line.") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where} holds a {type(row).__name__}, but each line is one JSON object. It has no columns. Mend that line."
        )
    return row


def _hugging_face(source: str, split: str, params: Mapping[str, Any]) -> list[Row]:
    import datasets

    try:
        if _saved_to_disk(Path(source)):
            loaded = datasets.load_from_disk(source, **params)
            dataset = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            dataset = datasets.load_dataset(source, split=split, **params)
    except Exception as error:  # the library raises a dozen classes; each means the same to the user
        raise DataError(
            f"The source is {source!r} (split {split!r}), but Hugging Face datasets cannot load it: "
            f"{type(error).__name__}: {error}. There is nothing to train on. Give a .jsonl file, a directory, a hub "
            "name or reasoning_gym:TASK, and check data.split and data.params."
        ) from error
    return list(dataset)


def _saved_to_disk(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _reasoning_gym(task: str, prompt_column: str, size: int, seed: int, params: Mapping[str, Any]) -> list[Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)[:5]
        raise DataError(
            f"The source is 'reasoning_gym:{task}', but there is no such task. There is nothing to train on. "
            f"Names near it: {', '.join(near)}."
        )
    try:
        entries = list(reasoning_gym.create_dataset(task, size=size, seed=seed % 2**32, **params))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"data.params is {dict(params)}, but the task {task!r} refuses it: {error}. No rows can be drawn. "
            "Change data.params (size and seed come from data.size and run.seed)."
        ) from error
    return [
        {prompt_column: entry["question"], "answer": entry["answer"], "entry": entry, "task": task} for entry in entries
    ]
