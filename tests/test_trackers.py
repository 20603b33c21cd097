import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leadline.config import Config, parse_config
from leadline.errors import ConfigError
from leadline.settings.run import Run
from leadline.trackers import TRACKERS, open_trackers


@pytest.fixture
def config() -> Config:
    return parse_config(
        {
            "model": {"name": "tiny"},
            "data": {"source": "rows.jsonl", "params": {"sizes": [1, 2]}},
            "rewards": [{"name": "exact_match"}],
        }
    )


class Recorder(ModuleType):
    """Stands for a package that wants a server: keeps what was called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> "Recorder":
            self.calls.append((name, args, kwargs))
            return self

        return call

    def called(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def fake(monkeypatch: pytest.MonkeyPatch, name: str) -> Recorder:
    module = Recorder(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_tensorboard_has_every_value_of_every_step_and_the_config(tmp_path: Path, config: Config) -> None:
    (tracker,) = open_trackers(["tensorboard"], tmp_path, config)
    tracker.log(1, {"step": 1, "reward/mean": 0.25, "kl/k3": math.nan})
    tracker.log(2, {"step": 2, "reward/mean": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert math.isnan(events.Scalars("kl/k3")[0].value)
    assert "config/text_summary" in events.Tags()["tensors"]


def test_tensorboard_files_are_readable_before_the_run_ends(tmp_path: Path, config: Config) -> None:
    (tracker,) = open_trackers(["tensorboard"], tmp_path, config)
    tracker.log(1, {"reward/mean": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tracker.close()
    assert [event.step for event in events.Scalars("reward/mean")] == [1]


def test_wandb_takes_its_step_from_ours_so_that_a_resume_loses_nothing(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = fake(monkeypatch, "wandb")
    (tracker,) = open_trackers(["wandb"], tmp_path / "demo", config)
    tracker.log(7, {"reward/mean": 0.5})
    tracker.close()
    ((_, settings),) = wandb.called("init")
    assert (settings["project"], settings["name"], settings["group"]) == ("leadline", "demo", "demo")
    assert settings["config"]["model"]["name"] == "tiny"
    assert wandb.called("define_metric") == [(("*",), {"step_metric": "step"})]
    assert wandb.called("log") == [(({"reward/mean": 0.5, "step": 7},), {})]
    assert len(wandb.called("finish")) == 1


def test_trackio_continues_the_run_of_that_name(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = fake(monkeypatch, "trackio")
    (tracker,) = open_trackers(["trackio"], tmp_path / "demo", config)
    tracker.log(7, {"step": 7, "reward/mean": 0.5})
    tracker.close()
    ((_, settings),) = trackio.called("init")
    assert (settings["name"], settings["resume"]) == ("demo", "allow")
    assert trackio.called("log") == [(({"reward/mean": 0.5},), {"step": 7})]
    assert len(trackio.called("finish")) == 1


def test_mlflow_gets_flat_parameters_and_names_that_it_accepts(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = fake(monkeypatch, "mlflow")
    (tracker,) = open_trackers(["mlflow"], tmp_path / "demo", config)
    tracker.log(7, {"reward/a<b/mean": 0.5})
    tracker.close()
    (((parameters,), _),) = mlflow.called("log_params")
    assert parameters["rewards.0.name"] == "exact_match"
    assert parameters["data.params.sizes.1"] == 2
    assert parameters["rollout.group_size"] == 8
    assert mlflow.called("log_metrics") == [(({"reward/a_b/mean": 0.5},), {"step": 7})]
    assert len(mlflow.called("end_run")) == 1


def test_several_trackers_are_opened_in_the_order_of_their_names(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "trackio"):
        fake(monkeypatch, name)
    trackers = open_trackers(["trackio", "wandb"], tmp_path, config)
    assert [type(tracker).__name__ for tracker in trackers] == ["Trackio", "WeightsAndBiases"]
    assert open_trackers([], tmp_path, config) == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_the_extra_before_anything_is_opened(
    name: str, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = fake(monkeypatch, "wandb")
    monkeypatch.setitem(sys.modules, TRACKERS[name][0], None)
    with pytest.raises(ConfigError, match=rf"run.trackers is '{name}'.*pip install leadline\[trackers\]"):
        open_trackers(["wandb", name], tmp_path, config)
    assert wandb.calls == []


def test_a_tracker_that_cannot_be_opened_says_why(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_login(**settings: Any) -> None:
        raise RuntimeError("no API key")

    wandb = fake(monkeypatch, "wandb")
    monkeypatch.setattr(wandb, "init", no_login, raising=False)
    with pytest.raises(ConfigError, match=r"'wandb', but it cannot be opened .*no API key"):
        open_trackers(["wandb"], tmp_path, config)


def test_every_name_that_the_config_accepts_has_a_tracker() -> None:
    (literal, _) = get_args(Run.model_fields["trackers"].annotation)
    assert set(get_args(literal)) == set(TRACKERS)
