import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from leadline.cli import app
from leadline.config import Config
from leadline.engines.hf import HFEngine
from leadline.errors import ConfigError, EngineError
from leadline.probes.preflight.flight import BEFORE_ENGINE, WITH_ENGINE, Preflight
from leadline.run_dir import read_metrics
from leadline.screen import Screen
from leadline.session import Session, open_session
from leadline.settings.run import CheckName
from tests.probes.preflight.flights import parts, recipe

ALL = list(get_args(CheckName))
TAG = {"name": "exact_match", "params": {"tag": "answer"}}
STRIPPED: dict[str, Any] = {
    "rewards": [TAG],
    "sampling": {"stop": ["</answer>"], "include_stop": False, "max_tokens": 8},
}
"""No completion ever has the tag that the reward looks for."""


def drawing(completion_ids: list[int]) -> float:
    """A reward that draws from the generators that everybody shares."""
    random.random(), np.random.rand(), torch.rand(1)
    return sum(completion_ids) / 1000


def opened(config: Config, path: Path, *, resume: bool = False) -> Session:
    screen = Screen(config, console=Console(file=io.StringIO(), width=500))
    return open_session(config, path, resume=resume, stopping=lambda: False, screen=screen)


def printed(session: Session) -> str:
    return session.screen.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def written(path: Path) -> dict[str, str]:
    found = json.loads((path / "preflight.json").read_text())
    return {check["check"]: check["verdict"] for check in found["checks"]}


def test_every_check_can_be_turned_off_by_its_name() -> None:
    assert [*BEFORE_ENGINE, *WITH_ENGINE] == ALL


def test_a_run_says_what_was_looked_at_on_its_screen_and_in_its_directory(tmp_path: Path) -> None:
    session = opened(recipe(tmp_path), tmp_path / "run")
    asyncio.run(session.run())
    assert written(tmp_path / "run") == dict.fromkeys(ALL, "ok") | {"special_tokens": "not checked"}
    lines = [line.split(":")[0] for line in printed(session).splitlines() if line.startswith("preflight")]
    assert lines == [f"preflight {name}" for name in ALL]


def test_what_is_named_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(recipe(tmp_path, run={"skip_checks": ALL}), tmp_path / "run")
    asyncio.run(session.run())
    assert written(tmp_path / "run") == dict.fromkeys(ALL, "not checked")
    with pytest.raises(ConfigError, match=r"run\.skip_checks"):
        recipe(tmp_path, run={"skip_checks": ["tokeniser"]})


def test_a_run_is_the_same_to_the_last_digit_with_and_without_it(tmp_path: Path) -> None:
    reward = [{"name": "tests.probes.preflight.test_flight:drawing"}]
    for name, left_out in (("with", []), ("without", ALL)):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        asyncio.run(opened(recipe(tmp_path, rewards=reward, run={"skip_checks": left_out}), tmp_path / name).run())
        (tmp_path / name / "drawn").write_text(repr((random.random(), np.random.rand(), float(torch.rand(1)))))
    one, other = tmp_path / "with", tmp_path / "without"
    model = "checkpoints/step_000002/model/model.safetensors"
    assert (one / model).read_bytes() == (other / model).read_bytes()
    for mine, theirs in zip(*(read_metrics(path / "metrics.jsonl") for path in (one, other)), strict=True):
        measured = {k: v for k, v in mine.items() if not k.startswith(("time/", "throughput/", "memory/"))}
        assert measured == {k: theirs[k] for k in measured}
    assert (one / "drawn").read_text() == (other / "drawn").read_text()


def test_what_is_wrong_before_an_engine_is_needed_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"names </answer>, but sampling.stop(.|\n)*run.skip_checks = \['special_tokens'\]"
    ):
        opened(recipe(tmp_path, **STRIPPED), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_faults_are_said_at_once(tmp_path: Path) -> None:
    config = recipe(tmp_path, **STRIPPED | {"rewards": [TAG | {"weight": -1.0}]})
    with pytest.raises(
        ConfigError, match=r"names </answer>(.|\n)*The policy would learn to be wrong(.|\n)*'rewards'\]"
    ):
        opened(config, tmp_path / "run")


def test_an_engine_that_is_off_stops_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(recipe(tmp_path), tmp_path / "run")
    generate = HFEngine.generate

    async def biased(*args: Any) -> Any:
        drawn = await generate(*args)
        for completion in drawn:
            object.__setattr__(completion, "logprobs", tuple(logprob + 0.2 for logprob in completion.logprobs))
        return drawn

    monkeypatch.setattr(HFEngine, "generate", biased)
    with pytest.raises(EngineError, match="nats a token from the policy's"):
        asyncio.run(session.run())
    assert written(tmp_path / "run")["parity"] == "wrong"
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert "preflight parity: wrong, see below" in printed(session)


def test_an_engine_that_draws_nothing_is_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*args: Any) -> Any:
        raise EngineError("The engine is gone.")

    monkeypatch.setattr(HFEngine, "generate", gone)
    with pytest.raises(EngineError, match="The engine is gone"):
        asyncio.run(opened(recipe(tmp_path), tmp_path / "run").run())
    assert written(tmp_path / "run")["weights"] == "wrong"


def test_generators_are_left_as_they_were(tmp_path: Path) -> None:
    made = parts(tmp_path, rewards=[{"name": "tests.probes.preflight.test_flight:drawing"}])
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    Preflight(made).before_engine()
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before


# leadline probe run ---------------------------------------------------------------------------------------------------


def probed(tmp_path: Path, *options: str, reward: str = "exact_match") -> tuple[int, str]:
    recipe(tmp_path)
    text = f"""
        model = {{name = "tiny", device = "cpu"}}
        data = {{source = "{tmp_path / "rows.jsonl"}"}}
        rewards = [{{name = "{reward}", params = {{tag = "answer"}}}}]
        sampling = {{max_tokens = 8}}
        eval = {{prompts = 2}}
        run = {{dir = "{tmp_path / "run"}"}}
    """
    path = tmp_path / "recipe.toml"
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    result = CliRunner().invoke(app, ["probe", "run", str(path), *options])
    assert not (tmp_path / "run").exists()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_recipe_is_probed_without_training(tmp_path: Path) -> None:
    code, shown = probed(tmp_path)
    assert code == 0
    assert shown.splitlines()[-1].startswith("Nothing is wrong with ")
    assert [name for name in ALL if f"\n{name}" in f"\n{shown}"] == ALL


def test_what_is_wrong_is_in_the_json_and_the_exit_code_is_1(tmp_path: Path) -> None:
    code, shown = probed(
        tmp_path, "--json", "--set", "sampling.stop=['</answer>']", "--set", "sampling.include_stop=false"
    )
    found = json.loads(shown)
    assert (code, found["wrong"]) == (1, 1)
    assert {c["check"]: c["verdict"] for c in found["checks"]}["special_tokens"] == "wrong"
    assert "weights" not in {c["check"] for c in found["checks"]}  # no engine is started for a run that cannot start


def test_a_recipe_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind is 'scripted'"):
        probed(tmp_path, "--set", "engine.kind=scripted")
