import asyncio

import pytest

from leadline.materials.rewards import closeness, hypothesis, inside, parses, physical
from leadline.rewards.scorer import build_scorer
from leadline.settings.reward import Reward
from leadline.types import Completion, FinishReason, Prompt

TEXTS = [
    "<hypothesis>raises the gap</hypothesis><modification>substitute Ga -> Al 0.25</modification>",  # 1.92 eV: inside
    "<hypothesis>raises the gap</hypothesis><modification>strain +1%</modification>",  # 1.40 eV, and the wrong sign
    "<hypothesis>raises the gap</hypothesis><modification>strain +9%</modification>",  # not physical
    "<hypothesis>raises the gap</hypothesis><modification>make it better</modification>",  # not readable
]
COLUMNS = {"material": "GaAs", "lowest": 1.8, "highest": 2.0}
MATERIAL, LOWEST, HIGHEST = (["GaAs"] * 4, [1.8] * 4, [2.0] * 4)


def test_each_component_judges_one_thing() -> None:
    assert parses(TEXTS, MATERIAL) == [1, 1, 1, 0]
    assert physical(TEXTS, MATERIAL) == [1, 1, 0, 0]
    assert hypothesis(TEXTS, MATERIAL) == [1, 0, 0, 0]
    assert inside(TEXTS, MATERIAL, LOWEST, HIGHEST) == [1, 0, 0, 0]


def test_closeness_is_how_much_of_the_way_to_the_window_is_made() -> None:
    assert closeness(TEXTS, MATERIAL, LOWEST, HIGHEST) == [1, 0, 0, 0]  # the second goes the other way
    half_way = ["<hypothesis>raises the gap</hypothesis><modification>substitute Ga -> Al 0.25</modification>"]
    start, reached = 1.554, 1.922
    far = reached + (reached - start)
    assert closeness(half_way, ["GaAs"], [far], [far + 0.2]) == pytest.approx([0.5], abs=0.01)
    beyond = reached - 0.1
    made = 1 - (reached - beyond) / (beyond - 0.1 - start)
    assert closeness(half_way, ["GaAs"], [beyond - 0.1], [beyond]) == pytest.approx([made], abs=0.02)


def test_closeness_of_a_start_in_the_window_is_1_or_nothing() -> None:
    assert closeness(TEXTS, MATERIAL, [1.3] * 4, [1.6] * 4) == [0, 1, 0, 0]


def test_a_recipe_scores_with_them() -> None:
    names = ("parses", "physical", "hypothesis", "inside", "closeness")
    scorer = build_scorer([Reward(name=f"leadline.materials.rewards:{name}") for name in names])
    scorer.check_columns(COLUMNS)
    completions = [Completion((1,), (0.0,), (0,), FinishReason.STOP)] * 4
    rollouts = asyncio.run(scorer.score(Prompt(0, "", (1,), COLUMNS), completions, TEXTS))
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert rollouts[0].reward == 5
    assert rollouts[1].reward == 2
    assert [rollout.reward for rollout in rollouts[2:]] == [1, 0]
