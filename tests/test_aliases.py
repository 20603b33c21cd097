import pytest

from leadline.aliases import IMPORTANCE_ALIASES
from tests.test_config import parse, problem


@pytest.mark.parametrize("alias", IMPORTANCE_ALIASES)
def test_a_name_of_trl_or_verl_sets_level_and_action(alias: str) -> None:
    objective = parse(objective={"importance_action": alias}).objective
    assert (objective.importance_level, objective.importance_action) == IMPORTANCE_ALIASES[alias]


@pytest.mark.parametrize(
    ("alias", "level", "action"),
    [("sequence_mask", "sequence", "mask"), ("token_truncate", "token", "truncate"), ("icepop", "token", "mask")],
)
def test_the_names_mean_what_they_say(alias: str, level: str, action: str) -> None:
    assert IMPORTANCE_ALIASES[alias] == (level, action)


def test_a_name_that_fixes_the_level_may_repeat_it_and_not_contradict_it() -> None:
    parse(objective={"importance_action": "sequence_mask", "importance_level": "sequence"})
    message = problem(objective={"importance_action": "sequence_mask", "importance_level": "token"})
    assert "importance_action is 'sequence_mask', but importance_level is 'token'" in message


def test_an_action_of_another_type_is_refused_like_any_other_value() -> None:
    assert "objective.importance_action is ['token_mask'], but" in problem(
        objective={"importance_action": ["token_mask"]}
    )
