"""`leadline sft` as its user meets it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import interrupted_while_it_loads, leadline, lines, start, wait_for

RECIPE = """
[model]
name = "tiny"
device = "cpu"
[data]
source = "rows.jsonl"
[sampling]
max_tokens = 16
[sft]
demonstrations_per_step = 2
[optimizer]
learning_rate = 1e-3
[eval]
prompts = 2
[run]
steps = 3
"""
ROWS = [{"prompt": f"{i} + {i}?", "completion": str(2 * i)} for i in range(8)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe and its data."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)
    write_rows(ROWS)
    return tmp_path


def write_rows(rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft(place: Path, *arguments: str) -> tuple[int, str]:
    return leadline(place / "output.txt", "sft", "recipe.toml", *arguments)


def test_a_run_ends_with_what_it_gained_and_where_the_model_is(place: Path) -> None:
    code, text = sft(place)
    assert code == 0, text
    assert "3 of 3 steps in" in text and "held-out loss (nats per token): " in text
    assert "model.name = 'runs/recipe/checkpoints/step_000003/model'" in text
    assert (place / "runs/recipe/checkpoints/step_000003/model/config.json").is_file()


def test_ctrl_c_while_parts_are_loaded_leaves_at_once_without_a_traceback(place: Path) -> None:
    code, err = interrupted_while_it_loads(place, "sft", "leadline.sft.session")
    assert code == 130 and "Traceback" not in err and not (place / "runs").exists()


def test_ctrl_c_leaves_a_checkpoint_and_the_command_that_continues(place: Path) -> None:
    arguments = ("sft", "recipe.toml", "--set", "run.steps=400")
    process = start(place / "output.txt", *arguments)
    assert wait_for(process, lambda: lines(place / "runs/recipe/metrics.jsonl") >= 2)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    text = (place / "output.txt").read_text()
    assert process.exitcode == 130, text
    assert "Stopped. Continue with: leadline sft recipe.toml --set run.steps=400 --resume" in text
    done = lines(place / "runs/recipe/metrics.jsonl")
    code, text = sft(place, "--set", f"run.steps={done + 1}", "--resume")
    assert code == 0 and f"{done + 1} of {done + 1} steps" in text, text


BAD: dict[str, tuple[list[str], str]] = {
    "a section of reinforcement learning": (["--set", "rollout.group_size=4"], "rollout is set, but there is no"),
    "a column that is not there": (["--set", "sft.completion_column=right"], "sft.completion_column is 'right', but"),
    "a completion that is too long": (
        ["--set", "sampling.max_tokens=1"],
        "sampling.max_tokens is 1, but the completion",
    ),
    "two options that contradict": (["--dry-run", "--resume"], "--resume is set, but --dry-run makes no step"),
    "nothing to resume": (["--resume"], "no config.json of a run can be read there"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_a_clear_error_and_leaves_nothing(arguments: list[str], message: str, place: Path) -> None:
    code, text = sft(place, *arguments)
    assert code == 2 and message in text and "Traceback" not in text
    assert not (place / "runs").exists()


def test_a_dry_run_reads_the_data_and_shows_a_demonstration(place: Path) -> None:
    code, text = sft(place, "--dry-run")
    assert code == 0, text
    assert "8 training and 2 held-out" not in text and "6 training and 2 held-out demonstrations" in " ".join(
        text.split()
    )
    assert "→ " in text and not (place / "runs").exists()


def test_a_dry_run_says_what_is_wrong_with_a_row(place: Path) -> None:
    write_rows([*ROWS, {"prompt": "9?"}])
    code, text = sft(place, "--dry-run")
    assert code == 2 and "Row 8 (counting from 0)" in text and "wrong" in text
