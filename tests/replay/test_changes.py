"""Single changes to the settings of a step, and which of them a replay can make."""

import pytest

from leadline.config import Config
from leadline.errors import ConfigError
from leadline.replay.changes import Change, asked_change, usual_changes
from tests.builders import settings

PLAIN = settings()


def shown(config: Config) -> set[str]:
    return {str(change) for change in usual_changes(config)}


def test_the_usual_changes_are_every_correction_but_the_one_that_was() -> None:
    actions = {
        str(change.settings["objective.importance_action"])
        for change in usual_changes(PLAIN)
        if "objective.importance_action" in change.settings
    }
    assert actions == {
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_truncate",
        "geometric_mask",
        "off",
    }


def test_no_usual_change_leaves_the_settings_as_they_are() -> None:
    for config in (PLAIN, settings(objective={"importance_action": "sequence_mask", "beta": 0.1})):
        assert all(change.config(config) != config for change in usual_changes(config))


@pytest.mark.parametrize(
    ("objective", "off"),
    [
        ({"beta": 0.1}, "beta = 0"),
        ({"entropy_bonus": 0.01}, "entropy_bonus = 0"),
        ({"importance_veto": 0.1}, "importance_veto = 0"),
        ({"entropy_quantile": 0.8}, "entropy_quantile = 0"),
        ({"mask_truncated": True}, "mask_truncated = false"),
        ({"on_unscored": "drop"}, "on_unscored = on_policy"),
    ],
)
def test_each_mask_and_term_that_is_on_is_taken_away_and_no_other(objective: dict[str, object], off: str) -> None:
    assert shown(settings(objective=objective)) - shown(PLAIN) == {off}


def test_full_precision_is_tried_where_there_is_less() -> None:
    assert "dtype = float32" in shown(settings(model={"dtype": "bfloat16"}))
    assert "dtype = float32" not in shown(PLAIN)


def test_an_alias_sets_the_level_too() -> None:
    config = Change({"objective.importance_action": "sequence_mask"}).config(PLAIN)
    assert (config.objective.importance_level, config.objective.importance_action) == ("sequence", "mask")


def test_several_settings_are_one_change() -> None:
    change = asked_change(["objective.importance_level=token", "objective.importance_action=mask"])
    assert change.config(PLAIN).objective.importance_action == "mask"
    assert change.as_settings == 'objective.importance_level = "token" and objective.importance_action = "mask"'
    assert not change.rescores and asked_change(["sampling.temperature=0.7"]).rescores


@pytest.mark.parametrize(
    "setting", ["rollout.group_size=4", "objective.overlong_buffer=4", "run.seed=1", "rewards.0.weight=2"]
)
def test_what_is_recorded_already_cannot_be_changed(setting: str) -> None:
    with pytest.raises(ConfigError, match="but a replay has the rollouts and rewards that were recorded"):
        asked_change([setting])


def test_an_unknown_setting_is_said() -> None:
    with pytest.raises(ConfigError, match=r"objective\.clip_hi is set, but there is no such setting"):
        asked_change(["objective.clip_hi=0.3"]).config(PLAIN)
