"""What in a directory can be read: logs, dumps and settings, grouped by the run that they belong to."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leadline.errors import LogError

MAX_DEPTH = 6
MAX_FILES = 3000
SKIPPED = re.compile(
    r"(model|pytorch_model|adapter_model|optimizer|scheduler|rng_state|scaler|tokenizer|vocab|merges|added_tokens|"
    r"special_tokens_map|tokenizer_config|generation_config|preprocessor_config|chat_template|environment|position|"
    r"findings|requirements|meta\.yaml|debug(-internal|-core)?|wandb-metadata|wandb-summary|README).*\.?\w*|"
    r"(preflight|profile)\.json|stalls\.jsonl|stalled\.txt|"
    r".*\.(safetensors|pt|pth|gguf|distcp|npy|npz|png|jpg|py|ipynb|html|md|lock|tmp)|events\.out\.tfevents.*\.profile-empty"
)
"""Names that never hold a log: weights, tokenizers, code. Everything else is looked into."""
INNER = re.compile(
    r"(checkpoint-\d+|runs|logs?|tensorboard(_log)?|tb|completions|rollouts?|blackbox|wandb|(offline-)?run-.*|latest-run|"
    r"files|exp_\d+|trainer|orchestrator|train|\w{3}\d\d_\d\d-\d\d-\d\d_.*|\.hydra|outputs?|metrics|params|config|debug)"
)
"""Directories inside a run, in contrast to directories that are runs of their own."""
WEIGHTS = ("checkpoints", "model", "weights", "global_step_", "hf")


@dataclass
class Found:
    """The files of one run. `mlflow` holds directories with one file for each metric."""

    root: Path
    files: list[Path] = field(default_factory=list)
    mlflow: list[Path] = field(default_factory=list)


def find(directory: Path) -> list[Found]:
    """The runs below a directory, by path. Raises LogError: it cannot be listed."""
    found: dict[Path, Found] = {}
    for count, (root, path, is_mlflow) in enumerate(_walk(directory)):
        if count >= MAX_FILES:
            break
        run = found.setdefault(root, Found(root))
        (run.mlflow if is_mlflow else run.files).append(path)
    return [found[root] for root in sorted(found)]


def _walk(directory: Path) -> Iterator[tuple[Path, Path, bool]]:
    try:
        os.listdir(directory)
    except OSError as error:
        raise LogError(
            f"PATH is {str(directory)!r}, but it cannot be listed ({error.strerror}). There is nothing to examine. "
            "Name a directory that is yours to read."
        ) from error
    for place, directories, names in os.walk(directory, followlinks=False):
        here = Path(place)
        depth = len(here.relative_to(directory).parts)
        is_mlflow = "metrics" in directories and "meta.yaml" in names
        if is_mlflow:
            yield here, here, True
            directories[:] = []
            continue
        directories[:] = sorted(name for name in directories if _entered(name)) if depth < MAX_DEPTH else []
        for name in sorted(names):
            boxed = here.name == "blackbox"
            wanted = name.endswith(".safetensors") if boxed else not SKIPPED.fullmatch(name)
            if wanted and (here / name).is_file() and not (here / name).is_symlink():
                yield _root(directory, here), here / name, False


def _entered(name: str) -> bool:
    return not name.startswith((*WEIGHTS, "__", ".git", ".venv", "node_modules", "site-packages", "artifacts"))


def _root(directory: Path, here: Path) -> Path:
    """The run that a directory belongs to: itself, or the nearest above it that is no part of another."""
    while here != directory and INNER.fullmatch(here.name):
        here = here.parent
    return here


def latest_states(files: Sequence[Path]) -> list[Path]:
    """Of the checkpoints' trainer states only the last, which holds the others."""
    states = [file for file in files if file.name == "trainer_state.json"]
    if len(states) < 2:
        return list(files)
    last = max(states, key=lambda file: (_number(file.parent.name), file.parent.name == ""))
    own = [state for state in states if not re.fullmatch(r"checkpoint-\d+", state.parent.name)]
    return [file for file in files if file not in states or file == last or file in own]


def _number(name: str) -> int:
    match = re.search(r"(\d+)$", name)
    return int(match[1]) if match else -1
