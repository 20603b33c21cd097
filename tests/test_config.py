import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leadline.config import SECTIONS, Config, dump_config, parse_config
from leadline.errors import ConfigError
from leadline.settings.objective import DEFAULT_AGGREGATION
from leadline.settings.reward import Reward

HOUSE_FORM = re.compile(r"\S+ (is|has) .+, but .+\. .+\. .+\.$")
"""`<setting> is <value>, but <fact>. <Consequence>. <Do this.>`"""


def values(**sections: Any) -> dict[str, Any]:
    needed = {"model": {"name": "tiny"}, "data": {"source": "x.jsonl"}, "rewards": [{"name": "exact_match"}]}
    return {**needed, **sections}


def parse(**sections: Any) -> Config:
    return parse_config(values(**sections))


def problem(**sections: Any) -> str:
    """The message for this config, each line of which is in the house form."""
    with pytest.raises(ConfigError) as caught:
        parse(**sections)
    lines = str(caught.value).splitlines()
    assert all(HOUSE_FORM.match(line) for line in lines), lines
    return str(caught.value)


# What a config is -----------------------------------------------------------------------------------------------------


def test_a_model_data_and_a_reward_are_all_that_a_run_needs() -> None:
    config = parse()
    assert config.rewards == (Reward(name="exact_match"),)
    assert config.run.steps == 100


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse().run.steps = 3  # type: ignore[misc]


def test_what_is_written_to_the_run_directory_is_read_back_the_same() -> None:
    config = parse(
        sampling={"stop": ["\n\n", "</answer>"], "stop_token_ids": [3]},
        rewards=[{"name": "length", "params": {"target": 3, "nested": [1, {"a": None}]}}],
        run={"trackers": ["tensorboard"]},
    )
    assert parse_config(json.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("exact_match", "exact_match"),
        ("package.module:judge", "judge"),
        ("rewards/mine.py:judge", "judge"),
        ("model:models/judge/", "judge"),
    ],
)
def test_a_reward_is_logged_under_the_last_part_of_its_name(name: str, label: str) -> None:
    assert Reward(name=name).resolved_label == label
    assert Reward(name=name, label="mine").resolved_label == "mine"


def test_each_loss_has_its_own_aggregation_unless_another_is_set() -> None:
    assert all(
        parse(objective={"loss": loss}).objective.resolved_aggregation == own
        for loss, own in DEFAULT_AGGREGATION.items()
    )
    assert parse(objective={"aggregation": "constant"}).objective.resolved_aggregation == "constant"


def test_an_update_makes_one_optimizer_step_per_epoch_and_minibatch() -> None:
    assert parse(optimizer={"epochs_per_batch": 3, "minibatches": 4}).optimizer.optimizer_steps == 12


def test_every_section_and_setting_has_a_docstring() -> None:
    assert SECTIONS.keys() == Config.model_fields.keys()
    for section in SECTIONS.values():
        assert section.__doc__
        for name, info in section.model_fields.items():
            assert info.description, f"{section.__name__}.{name}"


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"group_sise": 4}}, "rollout.group_sise is set, but there is no such setting. It would be ignored. Did you mean group_size?"),
        ({"sampling": {"group_size": 4}}, "sampling.group_size is set, but there is no such setting. It would be ignored. Did you mean rollout.group_size?"),
        ({"rolout": {}}, "rolout is set, but there is no such setting. It would be ignored. Did you mean rollout? Use one of: model, data, rewards,"),
        ({"rewards": [{"name": "length", "wieght": 2.0}]}, "rewards.0.wieght is set, but there is no such setting. It would be ignored. Did you mean weight?"),
        ({"model": {}}, "model.name is missing, but a run needs it. Nothing can start. Add it to the recipe."),
        ({"rewards": []}, "rewards is empty, but a run needs at least one. Nothing can start. Add a table [[rewards]]."),
        ({"rewards": {"name": "length"}}, "rewards is no list, but a run may have several. None could be told apart. Write [[rewards]]."),
        ({"model": "tiny"}, "model is 'tiny', but it is a section of settings. None of them would be set. Write [model] and its settings below."),
        ({"run": {"steps": "ten"}}, "run.steps is 'ten', but it should be a valid integer."),
        ({"run": {"steps": "10"}}, "run.steps is '10', but it should be a valid integer."),
        ({"run": {"steps": True}}, "run.steps is True, but it should be a valid integer."),
        ({"run": {"steps": 1.5}}, "run.steps is 1.5, but it should be a valid integer."),
        ({"run": {"steps": 0}}, "run.steps is 0, but it should be greater than or equal to 1."),
        ({"optimizer": {"tokens_per_micro": "all"}}, "optimizer.tokens_per_micro is 'all', but it should be a valid integer or 'auto'."),
        ({"optimizer": {"tokens_per_micro": 3}}, "optimizer.tokens_per_micro is 3, but it should be greater than or equal to 16 or 'auto'."),
        ({"model": {"name": "tiny", "compile": "yes"}}, "model.compile is 'yes', but it should be a valid boolean or 'auto'."),
        ({"optimizer": {"learning_rate": "1e-6"}}, "optimizer.learning_rate is '1e-6', but it should be a valid number."),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate is nan, but it should be a finite number."),
        ({"rewards": [{"name": "length", "weight": float("inf")}]}, "rewards.0.weight is inf, but it should be a finite number."),
        ({"sampling": {"stop": "###"}}, "sampling.stop is '###', but it should be a list."),
        ({"sampling": {"stop": [1]}}, "sampling.stop.0 is 1, but it should be a valid string."),
        ({"objective": {"loss": "ppo"}}, "objective.loss is 'ppo', but it should be 'grpo', 'dapo',"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size is 1, but it should be greater than or equal to 2."),
        ({"objective": {"advantage_epsilon": 1.0}}, "objective.advantage_epsilon is 1.0, but a group's reward std is often of that size. Advantages would vanish."),
        ({"rewards": [{"name": "length", "label": "a/b"}]}, "rewards.0.label is 'a/b', but"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused_in_words(sections: dict[str, Any], message: str) -> None:
    text = problem(**sections)
    assert message in text
    assert len(text.splitlines()) == 1, "what follows from the first problem is left out"


@pytest.mark.parametrize("missing", ["model", "data", "rewards"])
def test_a_section_that_a_run_needs_is_missed(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is missing, but a run needs it"):
        parse_config({name: value for name, value in values().items() if name != missing})


def test_every_problem_has_a_line_of_its_own() -> None:
    text = problem(run={"steps": 0, "sed": 1}, rewards=[{}, {"name": "length", "weight": "x"}])
    assert [line.split()[0] for line in text.splitlines()] == [
        "rewards.0.name",
        "rewards.1.weight",
        "run.steps",
        "run.sed",
    ]


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(problem(sampling={"stop": "x" * 5000})) < 250


def test_a_path_of_the_recipe_is_a_string_and_not_an_object() -> None:
    assert "data.source is" in problem(data={"source": Path("x.jsonl")})
