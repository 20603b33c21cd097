import random
from pathlib import Path
from typing import Any

import pytest

from leadline.errors import RewardError
from leadline.probes.preflight.parts import Undecided
from leadline.probes.preflight.rewards import rewards
from tests.probes.preflight.flights import parts

HERE = "tests.probes.preflight.test_rewards"


def broken(completion: str) -> float:
    raise ImportError("no module named sympy")


def words(completion: str) -> str:
    return "good"


def fickle(completion: str) -> float:
    return random.random()


def fragile(completion: str) -> float:
    return float(len(completion.split()[0]))


def contains(completion: str, answer: str) -> float:
    return float(answer in completion)


async def distant(completion: str) -> float:
    raise AssertionError("it was called")


def said(folder: Path, *listed: Any) -> str:
    return rewards(parts(folder, rewards=[one if isinstance(one, dict) else {"name": one} for one in listed]))


def test_a_reward_that_prefers_the_right_answer_says_in_which_form(tmp_path: Path) -> None:
    assert said(tmp_path, "exact_match").startswith("exact_match: in the form '{}' right scores 1, wrong 0, empty 0")


def test_what_a_reward_can_be_tricked_with_is_said_and_stops_nothing(tmp_path: Path) -> None:
    assert "mind: listing every possible answer scores like the right one" in said(tmp_path, f"{HERE}:contains")


def test_a_negative_weight_makes_wrong_answers_score_more(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"gives the right answer '\d+' -1, but the wrong one '\d+' 0.*sign of rewards"
    ):
        said(tmp_path, {"name": "exact_match", "weight": -1.0})


def test_a_penalty_that_sees_no_answer_is_not_judged_by_one(tmp_path: Path) -> None:
    assert "no right answer is known" in said(tmp_path, {"name": "tests.loops:token_sum", "weight": -1.0})


def test_a_reward_that_always_raises_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"no module named sympy.*Every rollout would be failed"):
        said(tmp_path, f"{HERE}:broken")


def test_a_reward_that_returns_no_number_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="good"):
        said(tmp_path, f"{HERE}:words")


def test_a_reward_that_raises_on_an_odd_text_or_changes_its_mind_is_said(tmp_path: Path) -> None:
    assert "it raises on an empty completion (RuntimeError: fragile: IndexError" in said(tmp_path, f"{HERE}:fragile")
    assert "the same text gets different rewards" in said(tmp_path, f"{HERE}:fickle")


def test_an_asynchronous_reward_is_not_called_and_that_is_said(tmp_path: Path) -> None:
    assert said(tmp_path, "exact_match", f"{HERE}:distant").endswith("; not called: distant")
    with pytest.raises(Undecided, match="not called: distant"):
        said(tmp_path, f"{HERE}:distant")
