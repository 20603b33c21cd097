import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leadline import __version__, cli
from leadline.config import SECTIONS
from leadline.model_sources import read_tokenizer
from leadline.settings.model import Model
from tests.processes import interrupted_while_it_loads, leadline

RECIPE = """
[model]
name = "tiny"
device = "cpu"
[data]
source = "rows.jsonl"
[[rewards]]
name = "exact_match"
[sampling]
max_tokens = 8
[rollout]
group_size = 2
groups_per_step = 2
[eval]
prompts = 2
[run]
steps = 1
"""

ROWS = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(8)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe and its data."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)
    write_rows(ROWS)
    return tmp_path


def write_rows(rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Printed:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def message(self) -> str:
        """Below the name of the error."""
        return self.err.split("\n", 1)[1].rstrip("\n")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `leadline ARGUMENTS` in this process."""

    def run(*arguments: str) -> Printed:
        monkeypatch.setattr(sys, "argv", ["leadline", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Printed(int(code or 0), captured.out, captured.err)

    return run


# Starting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["train", "nowhere.toml"]])
def test_what_needs_no_model_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom leadline.cli import main\n"
        f"sys.argv = ['leadline', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'datasets', 'polars', 'reasoning_gym'} & sys.modules.keys(), 'slow'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_version_is_printed(command: Any) -> None:
    printed = command("--version")
    assert (printed.code, printed.out) == (0, f"{__version__}\n")


def test_the_help_of_train_has_every_setting_and_fits_100_columns(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = command("train", "--help").out.splitlines()
    assert max(map(len, lines)) <= 100
    for name, section in SECTIONS.items():
        header = next(i for i, line in enumerate(lines) if re.match(rf"\[+{name}\]+  ", line))
        for field in section.model_fields:
            assert any(line.startswith(f"  {field} = ") for line in lines[header:]), f"{name}.{field}"


# Bad input: each a clear error, exit code 2, no traceback, nothing left behind -----------------------------------------


BAD_SETTINGS = {
    "an unknown setting": (["rollout.group_sise=4"], "rollout.group_sise is set, but there is no such setting"),
    "an unknown section": (["rolout.group_size=4"], "rolout is set, but there is no such setting"),
    "an ill-typed setting": (["run.steps=many"], "run.steps is 'many', but it should be a valid integer"),
    "a contradiction": (["optimizer.minibatches=3"], "optimizer.minibatches is 3, but rollout.groups_per_step is 2"),
    "a group of one": (["rollout.group_size=1"], "rollout.group_size is 1, but it should be greater than or equal to 2"),
    "a vast epsilon": (["objective.advantage_epsilon=1.0"], "objective.advantage_epsilon is 1.0, but a group's reward"),
    "a greedy group": (["sampling.temperature=0"], "sampling.temperature is 0, but a greedy group holds"),
    "a --set without a value": (["run.steps"], "--set is 'run.steps', but it has the form section.field=value"),
    "a --set of nothing": (["rewards.3.weight=1"], "--set is 'rewards.3.weight=1', but the recipe has no place"),
    "an engine for tests": (["engine.kind=scripted"], "engine.kind is 'scripted', but"),
    "a missing model": (["model.name=./no-model"], "model.name is './no-model', but transformers cannot load"),
    "a missing file": (["model.name=no.gguf"], "model.name is 'no.gguf', but there is no such file"),
    "a missing tokenizer": (["model.tokenizer=./none"], "model.tokenizer is './none', but transformers cannot load"),
    "missing data": (["data.source=none.jsonl"], "The source is 'none.jsonl', but it cannot be read"),
    "a missing prompt column": (["data.prompt_column=question"], "data.prompt_column is 'question', but Row 0"),
    "a missing reward column": (["rewards.0.name=length"], "The reward 'length' needs target, but the dataset's columns"),
    "an unknown reward": (["rewards.0.name=exact_mach"], "The reward is 'exact_mach', but there is no such built-in"),
    "a reward file that is not there": (["rewards.0.name=none.py:f"], "The reward is 'none.py:f', but importing 'none.py'"),
    "no room for a prompt": (["sampling.max_tokens=2048"], "sampling.max_tokens is 2048, but the model's context is 2048"),
    "a prompt beyond the limit": (["data.max_prompt_tokens=3"], "prompt tokens, but the limit is 3"),
    "too few prompts": (["eval.prompts=9"], "eval.prompts is 9, but 'rows.jsonl' has only 8 different prompts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_setting_that_cannot_work_is_told_plainly_and_nothing_is_left_behind(
    case: str, place: Path, command: Any
) -> None:
    overrides, message = BAD_SETTINGS[case]
    before = sorted(p.name for p in place.rglob("*"))
    printed = command("train", "recipe.toml", *(word for o in overrides for word in ("--set", o)))
    assert printed.code == 2
    assert message in printed.err, printed.err
    assert all(re.fullmatch(r".+, but .+\. .+\. .+", line) for line in printed.message.splitlines()), printed.err
    assert "Traceback" not in printed.err and printed.out == ""
    assert sorted(p.name for p in place.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "The recipe is 'recipe.toml', but it cannot be read (No such file or directory). Nothing"),
        ("[model\n", "The recipe is 'recipe.toml', but it is not valid TOML"),
        ("", "model is missing, but a run needs it. Nothing can start."),
    ],
)
def test_a_recipe_that_is_none_is_told_plainly(content: str | None, message: str, place: Path, command: Any) -> None:
    Path("recipe.toml").unlink()
    if content is not None:
        Path("recipe.toml").write_text(content)
    printed = command("train", "recipe.toml")
    assert printed.code == 2 and message in printed.err and "Traceback" not in printed.err


def test_a_nested_mistake_has_one_line_and_no_follow_up(place: Path, command: Any) -> None:
    printed = command("train", "recipe.toml", "--set", "rewards.0.wait=1")
    assert len(printed.message.splitlines()) == 1
    assert "at least 1 item" not in printed.err


def test_a_conversation_needs_a_chat_template(place: Path, command: Any) -> None:
    tokenizer = read_tokenizer(Model(name="tiny"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained("plain")
    write_rows([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS])
    printed = command("train", "recipe.toml", "--set", "model.tokenizer=plain")
    assert printed.code == 2 and not Path("runs").exists()
    assert "holds messages, but prompts are plain text: the tokenizer has no chat template" in printed.err


def test_a_prompt_longer_than_the_context_is_named_by_its_row(place: Path, command: Any) -> None:
    write_rows([*ROWS, {"prompt": "1 + " * 1000, "answer": "4"}])
    printed = command("train", "recipe.toml")
    assert printed.code == 2 and not Path("runs").exists()
    assert re.search(r"Row 8 .* has \d+ prompt tokens, but the limit is 2040", printed.err)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise ValueError('no')",
            r"rewards has 'mine: ValueError: no' on 'The answer is 5.', but .* Every rollout would be failed",
        ),
        ("return [1.0, 2.0]", r"The reward 'mine' returned list of 2 numbers, but it scores one completion"),
        ("return 'good'", r"The reward 'mine' returned str 'good', but it scores one completion"),
    ],
)
def test_a_reward_that_is_broken_everywhere_stops_the_run_plainly(
    body: str, message: str, place: Path, command: Any
) -> None:
    Path("mine.py").write_text(f"def mine(completion):\n    {body}\n")
    printed = command("train", "recipe.toml", "--set", "rewards.0.name=mine.py:mine")
    assert printed.code == 2 and printed.err.startswith("RewardError\n")
    assert re.search(message, printed.err) and "Traceback" not in printed.err
    assert not Path("runs").exists()


def test_a_long_message_is_not_broken_into_lines(place: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    printed = command("train", "recipe.toml", "--set", "data.source=a/long/path/that/would/be/broken/rows.jsonl")
    assert len(printed.message.splitlines()) == 1


# A run from the command line ------------------------------------------------------------------------------------------


def test_a_run_says_what_it_did_and_prints_no_bars_and_no_warnings(place: Path) -> None:
    code, text = leadline(place / "out.txt", "train", str(place / "recipe.toml"), *on_data(place))
    assert code == 0, text
    assert re.search(r"^1 of 1 steps in .*; the run is in runs/recipe$", text, re.MULTILINE), text
    assert "mean reward on 2 held-out prompts: 0.0000 before, 0.0000 after" in text
    expected = ("preflight ", "step ", "warning LL", "error LL", "1 of 1", "mean reward", "share with")
    assert [line for line in text.splitlines() if not line.startswith(expected)] == []


def on_data(place: Path) -> list[str]:
    """The process keeps this one's working directory."""
    os.chdir(place)
    return ["--set", f"data.source={place / 'rows.jsonl'}"]


def test_a_new_run_never_writes_over_another(place: Path, command: Any) -> None:
    assert command("train", "recipe.toml").code == 0
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    printed = command("train", "recipe.toml")
    assert printed.code == 2
    assert "run.dir is 'runs/recipe', but it already holds a run." in printed.err and "--resume" in printed.err
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_a_run_that_has_to_improve_and_does_not_exits_with_1(place: Path, command: Any) -> None:
    printed = command("train", "recipe.toml", "--set", "eval.require_improvement=true")
    assert printed.code == 1
    assert "paired difference +0.0000, 95 % bootstrap interval [+0.0000, +0.0000]" in printed.out


def test_a_directory_with_braces_is_taken_as_it_is(place: Path, command: Any) -> None:
    assert command("train", "recipe.toml", "--set", "run.dir=runs/{recipe}-{x}", "--set", "eval.prompts=0").code == 0
    assert Path("runs/recipe-{x}/config.json").exists()


def test_a_dry_run_cannot_be_resumed(place: Path, command: Any) -> None:
    printed = command("train", "recipe.toml", "--dry-run", "--resume")
    assert printed.code == 2 and "--resume is set, but --dry-run makes no step" in printed.err


def test_a_dry_run_leaves_nothing_behind(place: Path, command: Any) -> None:
    assert command("train", "recipe.toml", "--dry-run").code == 0
    assert not Path("runs").exists()


def test_ctrl_c_while_parts_are_loaded_leaves_at_once_without_a_traceback(place: Path) -> None:
    code, err = interrupted_while_it_loads(place, "train", "leadline.session")
    assert code == 130 and "Traceback" not in err and not (place / "runs").exists()


def test_training_without_the_trainers_packages_says_what_to_install(place: Path) -> None:
    blocked = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['leadline', 'train', 'recipe.toml']; "
        "from leadline.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", blocked], cwd=place, capture_output=True, text=True)
    assert done.returncode == 2
    assert "transformers" in done.stderr and "pip install 'leadline[train]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "runs").exists()
