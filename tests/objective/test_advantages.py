import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from leadline.objective.advantages import SCALINGS, group_advantages, zero_signal_groups

NAN, INF = math.nan, math.inf


def advantages(rewards, groups, scaling="group_std", epsilon=1e-6):
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), scaling=scaling, epsilon=epsilon
    ).tolist()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_advantages_equal_the_reference(scaling):
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    rewards[[3, 17]] = NAN
    rewards[20] = INF
    rewards[21] = -INF
    groups = torch.randint(0, 7, (40,), generator=generator)
    expected = reference.group_advantages(rewards.tolist(), groups.tolist(), scaling, 1e-6)
    got = group_advantages(rewards, groups, scaling=scaling, epsilon=1e-6)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert (got != 0).sum() > 30


@pytest.mark.parametrize(
    ("rewards", "scaling", "expected"),
    [
        # one right of two: the sample std of 0, 1 is 1/sqrt 2
        ([0.0, 1.0], "group_std", [-math.sqrt(0.5), math.sqrt(0.5)]),
        # one right of four: bounded by (n - 1) / sqrt n = 1.5
        ([0.0, 0.0, 0.0, 1.0], "group_std", [-0.5, -0.5, -0.5, 1.5]),
        # Dr. GRPO: no division
        ([0.0, 0.0, 0.0, 1.0], "none", [-0.25, -0.25, -0.25, 0.75]),
        # RLOO: against the mean of the three others
        ([0.0, 0.0, 0.0, 1.0], "leave_one_out", [-1 / 3, -1 / 3, -1 / 3, 1.0]),
        # all alike: nothing to learn, whatever the scaling
        ([0.3, 0.3, 0.3], "group_std", [0.0, 0.0, 0.0]),
        ([0.3, 0.3, 0.3], "leave_one_out", [0.0, 0.0, 0.0]),
        ([0.3, 0.3, 0.3], "batch_std", [0.0, 0.0, 0.0]),
        # no reward: out of the baseline, advantage 0; the others are compared as if it were not there
        ([NAN, 0.0, 1.0], "none", [0.0, -0.5, 0.5]),
        ([INF, 0.0, 1.0], "none", [0.0, -0.5, 0.5]),
        ([-INF, 0.0, 1.0], "group_std", [0.0, -math.sqrt(0.5), math.sqrt(0.5)]),
        ([INF, 0.0, 1.0], "leave_one_out", [0.0, -1.0, 1.0]),
        # one reward left, or none: nothing to compare it with
        ([NAN, NAN, 1.0], "group_std", [0.0, 0.0, 0.0]),
        ([NAN, NAN, 1.0], "leave_one_out", [0.0, 0.0, 0.0]),
        ([5.0], "batch_std", [0.0]),
        ([NAN, INF], "batch_std", [0.0, 0.0]),
    ],
)
def test_one_group_by_hand(rewards, scaling, expected):
    assert advantages(rewards, [0] * len(rewards), scaling) == pytest.approx(expected, abs=1e-5)
    zeros = [a for a, e in zip(advantages(rewards, [0] * len(rewards), scaling), expected, strict=True) if e == 0]
    assert zeros == [0.0] * len(zeros)


def test_the_batch_std_is_taken_over_all_finite_rewards():
    # rewards 0, 1, 10, 11 and a NaN: std of the four is 5.80; groups are centred on 0.5 and 10.5
    std = math.sqrt((5.5**2 + 4.5**2) * 2 / 3)
    expected = [-0.5 / std, 0.5 / std, -0.5 / std, 0.5 / std, 0.0]
    assert advantages([0.0, 1.0, 10.0, 11.0, NAN], [0, 0, 1, 1, 1], "batch_std") == pytest.approx(expected, rel=1e-5)


def test_groups_need_not_be_contiguous():
    assert advantages([0.0, 10.0, 1.0, 30.0], [0, 1, 0, 1], "none") == [-0.5, -10.0, 0.5, 10.0]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [0.1, 1.0, 0.7, -3.3, 1e6, 1e-9])
def test_equal_rewards_that_differ_by_rounding_have_advantage_exactly_0(scaling, value):
    once = torch.tensor([value] * 5, dtype=torch.float32)
    once[2] = torch.nextafter(once[2], torch.tensor(INF))  # the same components summed in another order
    got = group_advantages(once, torch.zeros(5, dtype=torch.long), scaling=scaling, epsilon=1e-12)
    assert got.tolist() == [0.0] * 5


def test_a_small_but_real_difference_survives():
    # 0.1 % of the reward: with a tiny epsilon it becomes a full advantage
    assert advantages([1.0, 1.001], [0, 0]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=0.01)


def test_epsilon_is_added_to_the_std():
    # std of 0, 1 is 0.7071; with epsilon 0.2929 the divisor is 1
    assert advantages([0.0, 1.0], [0, 0], epsilon=1 - math.sqrt(0.5)) == pytest.approx([-0.5, 0.5])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12),
    st.sampled_from(SCALINGS),
    st.floats(-50, 50, width=32),
)
def test_advantages_of_a_group_add_up_to_0_and_ignore_a_constant(rewards, scaling, offset):
    group = [0] * len(rewards)
    got = advantages(rewards, group, scaling)
    scale = max(map(abs, got)) + 1e-9
    assert math.fsum(got) == pytest.approx(0.0, abs=1e-3 * scale * len(got))
    shifted = advantages([r + offset for r in rewards], group, scaling)
    spread = max(rewards) - min(rewards)
    if spread == 0 or spread > 0.1:  # between, the shift itself rounds
        assert shifted == pytest.approx(got, rel=1e-3, abs=1e-3 * scale)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rewards_give_no_advantages(scaling):
    empty = torch.zeros(0)
    assert group_advantages(empty, empty.long(), scaling=scaling, epsilon=1e-6).shape == (0,)


def test_the_dtype_of_the_rewards_is_kept():
    rewards = torch.tensor([0.0, 1.0], dtype=torch.float32)
    assert group_advantages(rewards, torch.zeros(2).long(), scaling="none", epsilon=1e-6).dtype == torch.float32


def test_a_group_has_no_signal_when_no_advantage_is_nonzero():
    # group 0: one tiny advantage is a signal; 1: all 0; 2: no completion at all; 3: NaN is not hidden as "no signal"
    signal = zero_signal_groups(torch.tensor([0.0, 1e-30, 0.0, 0.0, NAN]), torch.tensor([0, 0, 1, 1, 3]), 4)
    assert signal.tolist() == [False, True, True, False]


def test_an_unknown_scaling_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'std'.*group_std, batch_std, none, leave_one_out"):
        advantages([0.0, 1.0], [0, 0], "std")


def test_rewards_and_groups_of_different_length_raise():
    with pytest.raises(TypeCheckError):
        group_advantages(torch.zeros(3), torch.zeros(2).long(), scaling="none", epsilon=1e-6)
    with pytest.raises(TypeCheckError):
        group_advantages(torch.zeros(3, 1), torch.zeros(3).long(), scaling="none", epsilon=1e-6)
    with pytest.raises(TypeCheckError):
        zero_signal_groups(torch.zeros(3), torch.zeros(2).long(), 1)
