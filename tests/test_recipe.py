from pathlib import Path
from typing import Any

import pytest

from leadline.config import parse_config
from leadline.errors import ConfigError
from leadline.recipe import load_config, recipe_values
from leadline.sft.config import parse_sft_config

RECIPES = sorted(Path(__file__).parents[1].glob("recipes/*.toml"))

TEXT = """
[model]
name = "tiny"
[data]
source = "x.jsonl"
[[rewards]]
name = "length"
params = {target = 3}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_a_valid_run(path: Path) -> None:
    values = recipe_values(path, [])
    parse_sft_config(values) if "sft" in path.stem else parse_config(values)


def test_there_are_recipes() -> None:
    assert {"tiny", "demo"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=7", ("run", "steps", 7)),
        ("run.dir=runs/other", ("run", "dir", "runs/other")),  # a bare word is a string
        ("optimizer.learning_rate = 3e-4", ("optimizer", "learning_rate", 3e-4)),
        ("model.chat_template_kwargs={enable_thinking = false}", ("model", "chat_template_kwargs", {"enable_thinking": False})),
        ("model.chat_template_kwargs.enable_thinking=false", ("model", "chat_template_kwargs", {"enable_thinking": False})),
        ('sampling.stop=["a", "b"]', ("sampling", "stop", ("a", "b"))),
        ("objective.importance_action=sequence_mask", ("objective", "importance_level", "sequence")),
        ("run.dir=a=b", ("run", "dir", "a=b")),
    ],
)  # fmt: skip
def test_a_setting_is_overridden_in_toml_syntax(recipe: Path, override: str, expected: tuple[str, str, Any]) -> None:
    section, name, value = expected
    assert getattr(getattr(load_config(recipe, [override]), section), name) == value


def test_an_entry_of_a_list_is_overridden_by_its_place_and_the_last_override_holds() -> None:
    config = load_config(RECIPES[-1], ["rewards.0.weight=2", "rewards.0.weight=3.0", "rewards.0.params.slack=9"])
    assert config.rewards[0].weight == 3.0
    assert config.rewards[0].params == {"target": 1, "slack": 9}


@pytest.mark.parametrize(
    "override",
    [
        "steps=3", "run.steps", "=3", ".steps=3", "run.=3", "run..steps=3",  # no section.field=value
        "rewards.1.weight=2", "rewards.first.weight=2", "rewards.name=x",  # not in the list
        "model.name.first=x",  # not below a string
    ],
)  # fmt: skip
def test_an_override_of_nothing_is_refused(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set is '.*', but .+\. Nothing was set\. .+"):
        load_config(recipe, [override])


def test_an_override_of_an_unknown_setting_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.stepz is set, but there is no such setting.*Did you mean steps\?"):
        load_config(recipe, ["run.stepz=3"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[model\nname = 'x'", r"but it is not valid TOML: .*line 1.* Mend that line\.$"),
        (b"\xff\xfe", r"but it cannot be read \(it is not UTF-8 text\)"),
        (None, r"but it cannot be read \(No such file or directory\)"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
