"""Further places to log metrics to. The run directory is the record; these are copies of it for people."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from leadline.errors import ConfigError
from leadline.settings.section import Section

PROJECT = "leadline"


class Tracker(Protocol):
    """Somewhere metrics are shown."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; NaN is passed on as NaN."""
        ...

    def close(self) -> None:
        """All that was logged has been handed over."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run directory. After a resume, TensorBoard hides the steps made twice."""

    def __init__(self, module: Any, run_path: Path, config: Section) -> None:
        self.writer = module.SummaryWriter(str(run_path / "tensorboard"))
        self.writer.add_text("config", f"```json\n{config.model_dump_json(indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project `leadline`, in a group named after the run directory: a resumed run is a second member."""

    def __init__(self, module: Any, run_path: Path, config: Section) -> None:
        name = run_path.name
        self.run = module.init(
            project=PROJECT, name=name, group=name, dir=str(run_path), config=config.model_dump(mode="json")
        )
        # W&B drops what is logged for a step below its own count, which a resume would meet
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({**metrics, "step": step})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run of the project `leadline`; a resumed run continues it."""

    def __init__(self, module: Any, run_path: Path, config: Section) -> None:
        self.module = module
        module.init(project=PROJECT, name=run_path.name, config=config.model_dump(mode="json"), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.module.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def close(self) -> None:
        self.module.finish()


class MLflow:
    """A run of the experiment `leadline`, at MLflow's own tracking address; each setting is a parameter."""

    def __init__(self, module: Any, run_path: Path, config: Section) -> None:
        self.module = module
        module.set_experiment(PROJECT)
        module.start_run(run_name=run_path.name)
        module.log_params(dict(_flat("", config.model_dump(mode="json"))))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow refuses names with anything else in them, and a reward's label is the user's
        allowed = {re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII): value for name, value in metrics.items()}
        self.module.log_metrics(allowed, step=step)

    def close(self) -> None:
        self.module.end_run()


TRACKERS: dict[str, tuple[str, Callable[[Any, Path, Section], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "trackio": ("trackio", Trackio),
    "mlflow": ("mlflow", MLflow),
}
"""By the name in `run.trackers`: the module it needs, and the tracker."""


def open_trackers(names: Sequence[str], run_path: Path, config: Section) -> list[Tracker]:
    """One tracker per name. Raises ConfigError: a package is missing (then none is opened), or one cannot be opened."""
    modules = [_load(name) for name in names]
    return [_open(name, module, run_path, config) for name, module in zip(names, modules, strict=True)]


def _load(name: str) -> Any:
    try:
        return importlib.import_module(TRACKERS[name][0])
    except ImportError as error:
        raise ConfigError(
            f"run.trackers is {name!r}, but its package cannot be imported ({error}). Nothing could be logged there. "
            "Run `pip install leadline[trackers]`, or remove it from run.trackers."
        ) from error


def _open(name: str, module: Any, run_path: Path, config: Section) -> Tracker:
    try:
        return TRACKERS[name][1](module, run_path, config)
    except Exception as error:  # every package has its own: no login, no server, no store
        raise ConfigError(
            f"run.trackers is {name!r}, but it cannot be opened ({type(error).__name__}: {error}). Nothing could be "
            "logged there. Set it up as that message says, or remove it from run.trackers."
        ) from error


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted names, e.g. ("rewards.0.name", "exact_match")."""
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        yield prefix.removesuffix("."), value
        return
    for name, item in value.items():
        yield from _flat(f"{prefix}{name}.", item)
