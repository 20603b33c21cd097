import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leadline.config import parse_config
from leadline.dry_run import check_recipe


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(9)))
    return path


def checked(rows: Path, **sections: Any) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and for each part its verdict and note."""
    values = {
        "model": {"name": "tiny"},
        "data": {"source": str(rows)},
        "rewards": [{"name": "exact_match"}],
        "rollout": {"group_size": 2, "groups_per_step": 2},
        "eval": {"prompts": 2},
        "sampling": {"max_tokens": 8},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section  # type: ignore[dict-item]
    console = Console(file=io.StringIO(), width=2000)
    code = check_recipe(parse_config(values), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return code, {line.split()[0]: _verdict_and_note(line) for line in lines}


def _verdict_and_note(line: str) -> tuple[str, str]:
    _, rest = line.split(maxsplit=1)
    verdict = next(word for word in ("ok", "wrong", "not checked") if rest.startswith(word))
    return verdict, rest.removeprefix(verdict).strip()


def test_a_recipe_that_works_is_ok_in_every_part_but_the_model(rows: Path) -> None:
    code, parts = checked(rows)
    assert code == 0
    assert {part: verdict for part, (verdict, _) in parts.items()} == {
        "recipe": "ok",
        "model": "not checked",
        "rewards": "ok",
        "tokenizer": "ok",
        "rows": "ok",
        "data": "ok",
        "columns": "ok",
        "loop": "ok",
    }
    assert parts["rows"][1] == "9 rows with the columns prompt, answer"
    assert parts["data"][1].startswith("7 training and 2 held-out prompts")
    assert parts["loop"][1] == "2 steps with a tiny random model and random completions"


@pytest.mark.parametrize(
    ("sections", "part", "note"),
    [
        ({"rewards": [{"name": "exact_mach"}]}, "rewards", "no such built-in"),
        ({"data": {"source": "none.jsonl"}}, "rows", "cannot be read"),
        ({"data": {"prompt_column": "question"}}, "data", "data.prompt_column is 'question', but Row 0"),
        ({"data": {"max_prompt_tokens": 3}}, "data", "but the limit is 3"),
        ({"eval": {"prompts": 10}}, "data", "only 9 different prompts to hold out"),
        ({"rewards": [{"name": "length"}]}, "columns", "needs target"),
        ({"model": {"name": "none.gguf"}}, "tokenizer", "there is no such file"),
    ],
)
def test_what_would_stop_the_run_is_wrong(sections: dict[str, Any], part: str, note: str, rows: Path) -> None:
    code, parts = checked(rows, **sections)
    assert code == 2
    verdict, text = parts[part]
    assert verdict == "wrong" and note in text
    assert parts.get("loop", ("not checked", ""))[0] == "not checked"


def test_a_reward_that_raises_on_most_completions_is_wrong(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(completion):\n    raise ValueError('[nan] is no answer')\n")
    code, parts = checked(rows, rewards=[{"name": f"{tmp_path}/mine.py:mine"}])
    assert code == 2
    assert parts["loop"][0] == "wrong"
    assert "the first: mine: ValueError: [nan] is no answer" in parts["loop"][1]  # brackets are no markup


def test_a_reward_that_raises_now_and_then_is_ok_and_said(rows: Path, tmp_path: Path) -> None:
    code = "def mine(completion, completion_ids):\n    assert len(completion_ids) > 2\n    return len(completion)\n"
    (tmp_path / "mine.py").write_text(code)
    exit_code, parts = checked(rows, rewards=[{"name": f"{tmp_path}/mine.py:mine"}], rollout={"group_size": 16})
    assert exit_code == 0
    assert parts["loop"][0] == "ok" and "of the random completions failed in a reward" in parts["loop"][1]


def test_a_model_or_data_on_a_hub_out_of_reach_is_not_checked_and_not_wrong(rows: Path) -> None:
    code, parts = checked(rows, model={"name": "some/model"})
    assert code == 0
    assert [parts[part][0] for part in ("tokenizer", "data", "loop")] == ["not checked"] * 3
    code, parts = checked(rows, data={"source": "some/data"})
    assert code == 0
    assert [parts[part][0] for part in ("tokenizer", "rows", "loop")] == ["ok", "not checked", "not checked"]


def test_an_engine_that_is_not_started_is_said(rows: Path) -> None:
    code, parts = checked(rows, engine={"kind": "vllm"})
    assert code == 0 and parts["engine"] == ("not checked", "'vllm' is not started in a dry run")


def test_every_setting_of_the_loss_takes_part_in_the_two_steps(rows: Path) -> None:
    """The loop is the real one: what breaks in it breaks here."""
    code, parts = checked(
        rows,
        objective={"loss": "gspo", "beta": 0.1, "overlong_buffer": 4},
        optimizer={"minibatches": 2},
        rollout={"max_staleness": 1, "refill": 1},
        rewards=[{"name": "tests.loops:token_sum"}],
    )
    assert code == 0, parts
