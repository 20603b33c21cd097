import math
from typing import Any

import pytest
import reasoning_gym as gym
from hypothesis import given
from hypothesis import strategies as st

from leadline.rewards import REWARDS
from leadline.rewards.exact_match import exact_match
from leadline.rewards.format_tags import format_tags, inside
from leadline.rewards.length import length
from leadline.rewards.math_answer import math_answer
from leadline.rewards.overlong import soft_overlong
from leadline.rewards.reasoning_gym import reasoning_gym


def test_the_registry_maps_each_name_to_the_function_of_that_name() -> None:
    assert {name: function.__name__ for name, function in REWARDS.items()} == {name: name for name in REWARDS}


@pytest.mark.parametrize(
    ("completion", "answer", "params", "expected"),
    [
        ("5", "5", {}, 1.0),
        (" 5\n", "5", {}, 1.0),
        (" 5\n", "5", {"strip": False}, 0.0),
        ("5", 5, {}, 1.0),  # a JSON number
        ("5.0", "5", {}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"casefold": True}, 1.0),
        ("so <answer> 5 </answer>.", "5", {"tag": "answer"}, 1.0),
        ("5", "5", {"tag": "answer"}, 0.0),
        ("5", None, {}, None),
        ("", "", {}, 1.0),
    ],
)
def test_exact_match(completion: str, answer: Any, params: dict[str, Any], expected: float | None) -> None:
    assert exact_match(completion, answer, **params) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("hm <think>a</think>\n <answer></answer> done", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),  # wrong order
        ("<think>a</think><answer>b", 0.0),  # not closed
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),  # twice
        ("<think>a<answer>b</answer></think>", 0.0),  # nested
        ("</think>a<think><answer>b</answer>", 0.0),  # closed before it opens
        ("a</think><answer>b</answer>", 0.0),  # not opened
        ("", 0.0),
    ],
)
def test_format_tags_wants_each_tag_once_closed_and_in_order(completion: str, expected: float) -> None:
    assert format_tags("2 + 3?", completion) == expected


def test_format_tags_counts_a_tag_that_the_prompt_opened() -> None:
    assert format_tags("[assistant]<think>\n", "a</think><answer>b</answer>") == 1.0
    assert format_tags("[assistant]<think>\n", "<think>a</think><answer>b</answer>") == 0.0
    assert format_tags("Use <think> tags.", "a</think><answer>b</answer>") == 0.0


def test_format_tags_takes_other_tags() -> None:
    assert format_tags("", "<x.>1</x.>", tags=["x."]) == 1.0
    assert format_tags("", "<xy>1</xy>", tags=["x."]) == 0.0


def test_inside_is_the_last_closed_pair() -> None:
    assert inside("<a>1</a><a>2\n</a><a>3", "a") == "2\n"
    assert inside("<a>1", "a") is None


def test_length_peaks_at_the_target_and_falls_linearly() -> None:
    scores = [length([0] * n, 4) for n in (0, 1, 2, 4, 6, 8, 9, 100)]
    assert scores == [0.0, 0.25, 0.5, 1.0, 0.5, 0.0, 0.0, 0.0]
    assert [length([0] * n, 4, slack=2) for n in (2, 3, 4, 5, 7)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="slack is 0"):
        length([0], 0)


# DAPO eq. 13 with L_max = 20 and L_cache = 4, by hand
@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (15, 0), (16, 0), (17, -0.25), (19, -0.75), (20, -1), (21, -1), (99, -1)]
)
def test_soft_overlong_is_equation_13_of_dapo(tokens: int, expected: float) -> None:
    assert soft_overlong(tokens, 20, 4, 1.0) == expected
    assert soft_overlong(tokens, 20, 4, 0.5) == expected / 2


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 199), st.floats(0.1, 10))
def test_soft_overlong_never_rewards_and_never_exceeds_its_penalty(n: int, most: int, buffer: int, top: float) -> None:
    assert -top <= soft_overlong(n, most, buffer, top) <= 0.0
    assert soft_overlong(n + 1, most, buffer, top) <= soft_overlong(n, most, buffer, top)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is \\boxed{1/2}.", "\\frac{1}{2}", 1.0),  # a bare LaTeX answer
        ("so 0.5", "$\\frac{1}{2}$", 1.0),
        ("I get 1,234.", "she sells\n#### 1234", 1.0),  # GSM8K
        ("x = 5", 5, 1.0),
        ("4, no, 5", "4", 0.0),  # the last expression counts
        ("I do not know", "4", 0.0),
        ("", "4", 0.0),
        ("4", None, None),
    ],
)
def test_math_answer(completion: str, answer: Any, expected: float | None) -> None:
    assert math_answer(completion, answer) == expected


def test_an_answer_without_mathematics_is_an_error_that_quotes_it() -> None:
    with pytest.raises(RuntimeError, match=r"the answer '' holds no mathematics"):
        math_answer("4", "")


def test_reasoning_gym_scores_with_the_scorer_of_the_rows_own_task() -> None:
    for task in ("chain_sum", "countdown"):
        entry = gym.create_dataset(task, size=1, seed=1)[0]
        assert reasoning_gym(f" {entry['answer']}\n", entry, task) == 1.0
        assert reasoning_gym(f"so <answer>{entry['answer']}</answer>", entry, task, tag="answer") == 1.0
        assert reasoning_gym("no idea", entry, task) < 0.1
        assert reasoning_gym(entry["answer"], entry, task, tag="answer") < 0.1
    assert math.isclose(reasoning_gym("-4 it is", {"answer": "-4"}, "chain_sum"), 2 / 8)  # its partial credit
