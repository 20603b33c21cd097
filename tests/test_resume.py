"""Killed at any instant and resumed, a run is the run that was never killed, to the last digit."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from polars.testing import assert_frame_equal

from leadline.run_dir import read_metrics
from tests.processes import leadline, lines, start, wait_for

STEPS = 8

RECIPE = f"""
[model]
name = "tiny"
device = "cpu"
[data]
source = "reasoning_gym:chain_sum"
size = 40
[[rewards]]
name = "length"
params = {{target = 1, slack = 16}}
[sampling]
max_tokens = 16
[rollout]
group_size = 4
groups_per_step = 3
[objective]
beta = 0.01
[optimizer]
learning_rate = 1e-3
schedule = "linear"
[eval]
prompts = 4
every = 3
[run]
steps = {STEPS}
checkpoint_every = 2
rollouts_every = 1
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "variant.toml"
    path.write_text(RECIPE)
    return path


class Trial:
    """A run that may be killed, resumed and compared."""

    def __init__(self, recipe: Path, path: Path) -> None:
        self.path = path
        self.output = path.with_suffix(".txt")
        self.arguments = ("train", str(recipe), "--set", f"run.dir={path}")

    def run(self, *more: str) -> str:
        code, text = leadline(self.output, *self.arguments, *more)
        assert code == 0, text
        return text

    def kill_when(self, ready: Callable[[], bool], delay: float = 0.0, *more: str) -> bool:
        """SIGKILL a moment after the condition holds; False if the run was over before."""
        process = start(self.output, *self.arguments, *more)
        hit = wait_for(process, ready)
        time.sleep(delay)
        process.kill()
        process.join()
        return hit and process.exitcode == -signal.SIGKILL

    def steps(self) -> int:
        return lines(self.path / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The run that was never killed."""
    trial = Trial(recipe, tmp_path_factory.mktemp("whole") / "run")
    trial.run()
    return trial


def record(path: Path) -> dict[str, Any]:
    """All that a run leaves, but what the clock and the machine have put in."""
    rows = [
        {name: repr(value) for name, value in row.items() if name.split("/")[0] not in ("time", "throughput", "memory")}
        for row in read_metrics(path / "metrics.jsonl")
    ]
    return {
        "metrics": rows,
        "evaluations": (path / "evaluations.jsonl").read_text(),
        "findings": (path / "findings.jsonl").read_text() if (path / "findings.jsonl").exists() else "",
        "checkpoints": sorted(p.name for p in (path / "checkpoints").iterdir()),
        "weights": (path / f"checkpoints/step_{STEPS:06d}/model/model.safetensors").read_bytes(),
    }


def assert_same(trial: Trial, whole: Trial) -> None:
    assert record(trial.path) == record(whole.path)
    for step in range(1, STEPS + 1):
        rollouts = [polars.read_parquet(t.path / f"rollouts/step_{step:06d}.parquet") for t in (trial, whole)]
        assert_frame_equal(*rollouts, check_exact=True)
    states = [torch.load(t.path / f"checkpoints/step_{STEPS:06d}/trainer.pt") for t in (trial, whole)]
    one, other = (state["optimizer"]["adamw"]["state"] for state in states)
    assert all(torch.equal(one[i][name], other[i][name]) for i in one for name in one[i])
    assert not list(trial.path.rglob("*.partial"))


def test_the_run_is_worth_resuming(whole: Trial) -> None:
    rows = read_metrics(whole.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len({row["reward/mean"] for row in rows}) > 4
    evaluated = [json.loads(line)["step"] for line in (whole.path / "evaluations.jsonl").read_text().splitlines()]
    assert evaluated == [0, 3, 6, 8]
    assert [p.name for p in sorted((whole.path / "checkpoints").iterdir())] == ["step_000006", "step_000008"]


@pytest.mark.parametrize("seed", range(3))
def test_killed_in_the_middle_of_steps_twice_and_resumed_it_is_the_same_run(
    seed: int, recipe: Path, whole: Trial, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    trial = Trial(recipe, tmp_path / "run")
    first = draw.randint(1, 4)
    assert trial.kill_when(lambda: trial.steps() >= first, draw.uniform(0, 0.1))
    second = draw.randint(first + 1, STEPS - 1)
    assert trial.kill_when(lambda: trial.steps() >= second, draw.uniform(0, 0.1), "--resume")
    trial.run("--resume")
    assert_same(trial, whole)


def test_killed_while_a_checkpoint_is_written_it_goes_on_from_the_one_before(
    recipe: Path, whole: Trial, tmp_path: Path
) -> None:
    trial = next(trial for n in range(9) if (trial := killed_while_saving(Trial(recipe, tmp_path / f"run{n}"))))
    trial.run("--resume")
    assert_same(trial, whole)


def killed_while_saving(trial: Trial) -> Trial | None:
    """The trial, killed with a half-written checkpoint; None if the checkpoint was quicker than the kill."""
    checkpoints = trial.path / "checkpoints"
    trial.kill_when(lambda: trial.steps() >= 4 and any(checkpoints.glob(".step_*.partial/**/*")))
    return trial if any(checkpoints.glob(".*.partial")) else None


def test_killed_before_there_is_a_checkpoint_it_starts_again_from_the_first_step(
    recipe: Path, whole: Trial, tmp_path: Path
) -> None:
    trial = Trial(recipe, tmp_path / "run")
    assert trial.kill_when(lambda: trial.steps() >= 1)
    assert not list((trial.path / "checkpoints").glob("step_*"))
    trial.run("--resume")
    assert_same(trial, whole)


def test_resuming_a_finished_run_changes_nothing_and_says_the_same(recipe: Path, whole: Trial, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in whole.path.rglob("*") if p.is_file()}
    text = whole.run("--resume")
    assert f"{STEPS} of {STEPS} steps" in text and "paired difference" in text and "Continue" not in text
    assert {p: p.read_bytes() for p in whole.path.rglob("*") if p.is_file()} == before


def test_ctrl_c_finishes_the_step_leaves_a_checkpoint_and_the_command_that_continues(
    recipe: Path, whole: Trial, tmp_path: Path
) -> None:
    trial = Trial(recipe, tmp_path / "my run")
    process = start(trial.output, *trial.arguments)
    assert wait_for(process, lambda: trial.steps() >= 3)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(30)
    text = trial.output.read_text()
    assert process.exitcode == 130, text
    assert "Stopping after this step" in text and "Traceback" not in text
    steps = trial.steps()
    assert 3 <= steps < STEPS
    assert (trial.path / f"checkpoints/step_{steps:06d}").is_dir()
    assert f"Stopped. Continue with: leadline train {recipe} --set 'run.dir={trial.path}' --resume" in text
    trial.run("--resume")
    kept = record(whole.path)
    resumed = record(trial.path)
    assert resumed.pop("checkpoints") and kept.pop("checkpoints")  # one more, at another step, took an old one's place
    assert resumed == kept


def test_a_second_ctrl_c_leaves_at_once(recipe: Path, tmp_path: Path) -> None:
    trial = Trial(recipe, tmp_path / "run")
    reward = Path(__file__).with_name("slow_reward.py")
    settings = [f"rewards.0.name={reward}:slow", "rewards.0.params={}", "eval.prompts=0", "eval.every=0"]
    process = start(trial.output, *trial.arguments, *(word for s in settings for word in ("--set", s)))
    assert wait_for(process, lambda: trial.steps() >= 1)
    os.kill(process.pid or 0, signal.SIGINT)
    assert wait_for(process, lambda: "Stopping after this step" in trial.output.read_text())
    begun = time.perf_counter()
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(30)
    assert process.exitcode == 130
    assert time.perf_counter() - begun < 1.2  # a step takes 1.5 s at least
    assert trial.steps() == 1
    assert "Stopped. Continue" not in trial.output.read_text()
