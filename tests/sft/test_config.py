"""A fine-tuning recipe: nothing in it is ignored."""

from typing import Any

import pytest

from leadline.errors import ConfigError
from leadline.settings_help import settings_help
from leadline.sft.config import MEANT, SFT_SECTIONS, parse_sft_config
from tests.sft.runs import sft_config, values

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a sampling temperature": ({"sampling": {"temperature": 0.6}}, "sampling.temperature is 0.6, but supervised"),
    "minibatches": ({"optimizer": {"minibatches": 2}}, "optimizer.minibatches is 2, but supervised"),
    "a pass threshold": ({"eval": {"pass_threshold": 0.5}}, "eval.pass_threshold is 0.5, but supervised"),
    "rollouts": ({"run": {"rollouts_every": 3}}, "run.rollouts_every is 3, but supervised"),
    "an objective": ({"objective": {"beta": 0.1}}, "objective is set, but there is no such setting"),
    "more greedy prompts than held out": (
        {"sft": {"greedy_prompts": 9}},
        "sft.greedy_prompts is 9, but eval.prompts is 3",
    ),
    "rewards of nothing": ({"rewards": [{"name": "length"}]}, "rewards are listed, but sft.greedy_prompts is 0"),
    "float16": ({"model": {"dtype": "float16"}}, "model.dtype is 'float16'"),
    "a misspelt setting": ({"sft": {"demonstration_per_step": 3}}, "Did you mean demonstrations_per_step"),
}


@pytest.mark.parametrize(("sections", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_meant_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sft_config(**sections)


def test_the_learning_rate_of_reinforcement_learning_is_no_default() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate is not set, but its default of 1e-06"):
        parse_sft_config({**values(), "optimizer": {"warmup_steps": 2}})
    with pytest.raises(ConfigError, match="optimizer is missing"):
        parse_sft_config({name: section for name, section in values().items() if name != "optimizer"})


def test_the_policy_sees_reinforce_with_a_token_mean_and_no_weights() -> None:
    objective = sft_config().policy_config().objective
    assert (objective.loss, objective.resolved_aggregation) == ("reinforce", "token_mean")
    assert (objective.importance_action, objective.beta, objective.entropy_bonus) == ("off", 0.0, 0.0)


def test_the_help_has_every_setting_that_means_something_and_no_other() -> None:
    text = settings_help(100, SFT_SECTIONS, MEANT)
    for name, section in SFT_SECTIONS.items():
        part = f"\n{text}".split(f"[{name}]{']' if name == 'rewards' else ''}  ", 1)[1].split("\n[", 1)[0]
        for field in section.model_fields:
            assert (f"\n  {field} = " in part) == (field in MEANT.get(name, section.model_fields)), f"{name}.{field}"
