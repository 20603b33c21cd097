import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from leadline.errors import RewardError
from leadline.rewards.values import batch_values, single_value


@pytest.mark.parametrize(
    "returned",
    [
        0.5,
        Fraction(1, 2),
        np.float32(0.5),
        np.array(0.5),
        np.array([0.5]),
        torch.tensor(0.5),
        torch.tensor([0.5], dtype=torch.bfloat16),
        torch.tensor([0.5], requires_grad=True),
        [0.5],
    ],
)
def test_one_number_in_any_wrapping_is_a_reward(returned: Any) -> None:
    value = single_value("r", returned)
    assert value == 0.5
    assert type(value) is float


def test_bool_int_and_none_are_rewards() -> None:
    assert [single_value("r", v) for v in (True, False, 3, np.bool_(True), None)] == [1.0, 0.0, 3.0, 1.0, None]


def test_values_that_are_not_finite_pass_here_and_fail_their_rollout_later() -> None:
    assert single_value("r", 10**400) == math.inf
    assert single_value("r", -(10**400)) == -math.inf
    assert math.isnan(single_value("r", math.nan) or 0.0)


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        ("0.5", "str '0.5'"),
        ({"reward": 1.0}, "dict"),
        ([0.1, 0.2], "list of 2 numbers"),
        ([], "list of 0 numbers"),
        (np.zeros(7), r"ndarray of shape \(7,\)"),  # one per token
        (torch.zeros(1, 1), r"Tensor of shape \(1, 1\)"),
        (1j, "complex"),
    ],
)
def test_what_is_not_one_number_is_named_in_the_error(returned: Any, described: str) -> None:
    with pytest.raises(RewardError, match=f"The reward 'r' returned {described}, but it scores one completion"):
        single_value("r", returned)


@pytest.mark.parametrize(
    "returned",
    [
        [0.5, None, 1],
        (0.5, None, True),
        [np.float64(0.5), None, torch.tensor(1)],
        np.array([0.5, None, 1.0], dtype=object),
    ],
)
def test_a_batch_is_one_value_per_completion(returned: Any) -> None:
    assert batch_values("r", returned, 3) == [0.5, None, 1.0]


def test_arrays_and_tensors_are_batches() -> None:
    assert batch_values("r", np.array([1, 2]), 2) == [1.0, 2.0]
    assert batch_values("r", torch.tensor([1.0, 2.0], requires_grad=True), 2) == [1.0, 2.0]
    assert batch_values("r", torch.tensor([True, False]), 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "count", "described"),
    [
        ([0.1, 0.2], 3, "list of 2 numbers"),
        (0.5, 1, "float"),  # would pass with one completion and fail with two
        (None, 1, "NoneType"),  # a forgotten `return`
        (torch.zeros(2, 7), 2, r"Tensor of shape \(2, 7\)"),  # one per token
        (np.zeros((2, 1)), 2, r"ndarray of shape \(2, 1\)"),
        ([[0.1], [0.2]], 2, "list of 2 holding a list"),
        (["0.1", 0.2], 2, "list of 2 holding a str"),
        ({0: 0.1, 1: 0.2}, 2, "dict"),
        ({0.1, 0.2}, 2, "set"),
        ("ab", 2, "str 'ab'"),
    ],
)
def test_what_is_not_one_value_per_completion_is_named_in_the_error(returned: Any, count: int, described: str) -> None:
    with pytest.raises(RewardError, match=f"The reward 'r' returned {described}, but it scores {count} completions"):
        batch_values("r", returned, count)
