"""The policy that is probed, and the weights that the engine may hold instead: from names and directories."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from leadline.errors import LeadlineError, ModelError
from leadline.model_sources import read_model
from leadline.models import Loaded, load_model
from leadline.probes.engine.variants import Holding
from leadline.settings.model import Model


@dataclass(frozen=True, slots=True)
class Chosen:
    """The policy in float32, what lies below its adapter, and other weights of its architecture."""

    name: str
    """Of the directory or model: what an engine would be started with."""
    loaded: Loaded
    base: dict[str, Tensor] | None
    others: tuple[Holding, ...]
    unread: tuple[str, ...] = ()
    """Weights that were found beside the policy and could not be loaded."""


def choose(model: str, adapter: Path | None, older: Sequence[Path]) -> Chosen:
    """The policy of `--model`: a model, or the directory of a run, of which the last checkpoint is taken and the
    earlier ones are weights that the engine may hold. Raises ModelError."""
    disable_progress_bar()  # of transformers: the report is what is to be seen
    run = _Run.of(Path(model))
    name = run.last if run else model
    loaded = load_model(Model(name=name, device="auto"))
    base = _merge(loaded, adapter) if adapter else None
    named = [(f"those of {path}", str(path)) for path in older]
    others = [Holding(said, _weights(path, name)) for said, path in named]
    unread = []
    for said, path in run.earlier if run else ():
        try:
            others.append(Holding(said, _weights(path, name)))
        except LeadlineError as error:
            unread.append(f"{said}: {error}")
    return Chosen(name, loaded, base, tuple(others), tuple(unread))


@dataclass(frozen=True, slots=True)
class _Run:
    last: str
    earlier: list[tuple[str, str]]

    @classmethod
    def of(cls, path: Path) -> "_Run | None":
        """The checkpoints of a run directory; None if the path is none."""
        found = sorted(path.glob("checkpoints/step_*/model")) if path.is_dir() else []
        if not found:
            return None
        *earlier, last = found
        named = [(f"those of {place.parent.name}", str(place)) for place in reversed(earlier)]
        return cls(str(last), [*named, *_started_from(path)])


def _started_from(path: Path) -> list[tuple[str, str]]:
    from leadline.run_dir import RunDir

    name = RunDir.open(path).config.model.name
    return [] if name == "tiny" else [(f"those of {name}, from which the run started", name)]


def _weights(path: str, model: str) -> dict[str, Tensor]:
    """By parameter name; of a LoRA adapter merged into `model`."""
    if (Path(path) / "adapter_config.json").is_file():
        base = load_model(Model(name=model))
        _merge(base, Path(path))
        return {name: parameter.detach() for name, parameter in base.model.named_parameters()}
    read: Any = read_model(Model(name=path), 0)
    return {name: parameter.detach() for name, parameter in read.named_parameters()}


def _merge(loaded: Loaded, adapter: Path) -> dict[str, Tensor]:
    """The adapter is merged into the model, in place. Returns the weights below it."""
    from peft import PeftModel

    model: Any = loaded.model
    below = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        with warnings.catch_warnings():
            # peft asks transformers for a property that newer versions have renamed
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
            PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"--adapter is {str(adapter)!r}, but peft cannot put it on the model: {' '.join(str(error).split())[:200]}. "
            "Nothing can be compared. Give a directory with adapter_config.json, and --model the model below it."
        ) from error
    return below
