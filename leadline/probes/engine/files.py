"""Reads tokens with two columns of logprobs, the engine's and the trainer's, from what trainers write down."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.errors import LogError, RunDirError
from leadline.probes.engine.drawn import Drawn
from leadline.settings.rollout import Sampling

CSV_COLUMNS = ("completion", "position", "engine_logprob", "trainer_logprob")
NAMES = {
    "nemo": ("generation_logprobs", "prev_logprobs", "token_loss_mask"),
    "prime-rl": ("inference_logprobs", "trainer_logprobs", "loss_mask"),
}
"""Of the columns that two trainers write beside `token_ids`: engine, trainer, mask."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a source holds."""

    kind: str
    drawn: Drawn
    sampling: Sampling | None = None
    """How it was sampled, where the source says so."""


def read_recorded(path: Path) -> Recorded:
    """The tokens of a leadline run or black box, a NeMo-RL or prime-rl JSONL, a slime dump, or a CSV file.

    Raises LogError.
    """
    try:
        recorded = _reader(path)(path)
    except (OSError, UnicodeDecodeError, RunDirError) as error:
        raise _unusable(path, f"cannot be read ({error})") from error
    if not len(recorded.drawn.engine):
        raise _unusable(path, "holds no token that was drawn")
    return recorded


def _reader(path: Path) -> Callable[[Path], Recorded]:
    if path.is_dir():
        return _directory
    readers = {".safetensors": _blackbox, ".jsonl": _json_lines, ".pt": _slime, ".csv": _csv}
    if path.suffix not in readers:
        raise _unusable(path, f"is none of the files that can be read ({', '.join(readers)}, a run directory)")
    return readers[path.suffix]


def _unusable(path: Path, fact: str) -> LogError:
    return LogError(
        f"--from is {str(path)!r}, but it {fact}. There is nothing to compare. Name a leadline run or black box, NeMo-RL's "
        "train_data_step*.jsonl, prime-rl's token export, slime's --save-debug-train-data, or a CSV file with the columns "
        + ", ".join(CSV_COLUMNS)
        + "."
    )


# leadline -------------------------------------------------------------------------------------------------------------


def _directory(path: Path) -> Recorded:
    """The newest black box of a run; or all token files of another trainer's directory, as one."""
    boxes = sorted(path.glob("blackbox/step_*.safetensors"))
    if boxes:
        return _blackbox(boxes[-1])
    files = sorted(path.rglob("*.jsonl")) or sorted(path.rglob("*.pt"))
    if not files:
        raise _unusable(path, "has no black box and no file of tokens")
    return read_recorded(files[-1])


def _blackbox(path: Path) -> Recorded:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise _unusable(path, f"is not whole ({error})") from error
    missing = {"token_ids", "completion_of_token", "rollout_logprobs", "seen_tokens"} - tensors.keys()
    if missing:
        raise _unusable(path, f"lacks {', '.join(sorted(missing))}: no token of that step was forwarded")
    return Recorded("leadline black box", _from_blackbox(tensors), _sampling_of(path))


def _from_blackbox(tensors: Mapping[str, Tensor]) -> Drawn:
    tokens = tensors["seen_tokens"].flip(0)  # of a token that several optimizer steps saw, the first stays
    owner, group = tensors["completion_of_token"], tensors["group_of_completion"]
    prompts = [tuple(tensors["prompt_ids"][tensors["group_of_prompt_token"] == g].tolist()) for g in group.tolist()]
    lengths = torch.bincount(owner, minlength=len(group))
    completions = tensors["token_ids"].split(lengths.tolist())
    kept = [i for i, completion in enumerate(completions) if len(completion)]
    return Drawn(
        prompts=tuple(prompts[i] for i in kept),
        completions=tuple(tuple(completions[i].tolist()) for i in kept),
        engine=tensors["rollout_logprobs"].double(),
        trainer=_placed(tokens, tensors["seen_old_logprobs"].flip(0), len(owner)),
        entropies=_placed(tokens, tensors["seen_entropies"].flip(0), len(owner)),
        ages=tensors["staleness"].double(),
    )


def _placed(places: Tensor, values: Tensor, length: int) -> Tensor:
    placed = torch.full((length,), torch.nan, dtype=torch.float64)
    placed[places.long()] = values.double()
    return placed


def _sampling_of(box: Path) -> Sampling | None:
    from leadline.run_dir import RunDir

    run = box.parents[1]
    return RunDir.open(run).config.sampling if (run / "config.json").is_file() else None


# Other trainers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence; per-token lists of the same length as `ids`."""

    ids: Sequence[int]
    mask: Sequence[float]
    engine: Sequence[float]
    trainer: Sequence[float] | None
    entropies: Sequence[float] | None = None


def _json_lines(path: Path) -> Recorded:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise _unusable(path, f"has a line that is not JSON ({error})") from error
    for kind, (engine, trainer, mask) in NAMES.items():
        if rows and all(isinstance(row, dict) and {"token_ids", engine, mask} <= row.keys() for row in rows):
            found = [
                _Row(row["token_ids"], row[mask], row[engine], row.get(trainer), row.get("entropy")) for row in rows
            ]
            return Recorded(f"{kind} token file", _joined(path, found))
    raise _unusable(path, "has no rows with token_ids, a mask and two columns of logprobs")


def _slime(path: Path) -> Recorded:
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can fail in any way, and this one must not run anything
        reason = " ".join(str(error).split())[:120]
        raise _unusable(path, f"cannot be loaded without running code from it ({reason})") from error
    if isinstance(dump, dict) and isinstance(dump.get("rollout_data"), dict):
        return Recorded("slime train dump", _joined(path, list(_slime_rows(dump["rollout_data"]))))
    if isinstance(dump, dict) and isinstance(dump.get("samples"), list):
        columns = {
            "tokens": [sample["tokens"] for sample in dump["samples"]],
            "response_lengths": [sample["response_length"] for sample in dump["samples"]],
            "loss_masks": [sample.get("loss_mask") for sample in dump["samples"]],
            "rollout_log_probs": [sample.get("rollout_log_probs") for sample in dump["samples"]],
        }
        return Recorded("slime rollout dump", _joined(path, list(_slime_rows(columns))))
    raise _unusable(path, "holds neither rollout_data nor samples")


def _slime_rows(data: Mapping[str, Any]) -> Iterator[_Row]:
    """Logprobs and masks cover the response; tokens cover the prompt too."""
    count = len(data["tokens"])
    missing: list[Any] = [None] * count
    columns = (data.get(name) or missing for name in ("loss_masks", "rollout_log_probs", "log_probs"))
    for ids, length, mask, engine, trainer in zip(data["tokens"], data["response_lengths"], *columns, strict=True):
        before = [0.0] * (len(ids) - int(length))
        if engine is None:
            continue
        yield _Row(
            _plain(ids),
            [*before, *(_plain(mask) if mask is not None else [1.0] * int(length))],
            [*before, *_plain(engine)],
            None if trainer is None else [*before, *_plain(trainer)],
        )


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _joined(path: Path, rows: Sequence[_Row]) -> Drawn:
    """Prompt = what lies before the first trained token; a token outside the mask is not scored."""
    prompts, completions = [], []
    columns: dict[str, list[Tensor]] = {"engine": [], "trainer": [], "entropies": []}
    for number, row in enumerate(rows, start=1):
        lengths = {len(column) for column in (row.ids, row.mask, row.engine, row.trainer) if column is not None}
        if len(lengths) > 1:
            raise _unusable(path, f"has columns of different lengths in row {number} ({sorted(lengths)})")
        trained = [i for i, value in enumerate(row.mask) if value]
        if not trained:
            continue
        span = slice(trained[0], trained[-1] + 1)
        prompts.append(tuple(row.ids[: span.start]))
        completions.append(tuple(row.ids[span]))
        inside = torch.tensor([bool(value) for value in row.mask[span]])
        for name, found in columns.items():
            values = getattr(row, name)
            column = _floats(values[span]) if values is not None else torch.full((len(inside),), torch.nan)
            found.append(torch.where(inside, column.double(), torch.nan))
    joined = {name: torch.cat(found) if found else torch.zeros(0) for name, found in columns.items()}
    known = {name: None if bool(values.isnan().all()) else values for name, values in joined.items()}
    return Drawn(tuple(prompts), tuple(completions), joined["engine"], known["trainer"], known["entropies"])


def _floats(values: Sequence[Any]) -> Tensor:
    return torch.tensor([torch.nan if value is None else float(value) for value in values], dtype=torch.float64)


# CSV ------------------------------------------------------------------------------------------------------------------


def _csv(path: Path) -> Recorded:
    import polars

    try:
        table = polars.read_csv(path, infer_schema_length=None, null_values=["", "nan", "NaN", "null"])
    except polars.exceptions.PolarsError as error:
        raise _unusable(path, f"is not a table ({' '.join(str(error).split())[:100]})") from error
    missing = [name for name in CSV_COLUMNS if name not in table.columns]
    if missing:
        raise _unusable(path, f"lacks the columns {', '.join(missing)}")
    table = table.sort("completion", "position", maintain_order=True)
    sizes = table.group_by("completion", maintain_order=True).len()["len"].to_list()

    def column(name: str) -> Tensor | None:
        return _floats(table[name].to_list()) if name in table.columns else None

    engine, trainer = column("engine_logprob"), column("trainer_logprob")
    assert engine is not None
    ids = table["token_id"].to_list() if "token_id" in table.columns else [0] * len(table)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    completions = [tuple(ids[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    drawn = Drawn(((),) * len(sizes), tuple(completions), engine, trainer, column("entropy"), column("age"))
    return Recorded("CSV file", drawn)
