import math

import pytest
import torch
from jaxtyping import TypeCheckError

from leadline.objective.ratios import MAX_LOG_RATIO, bounded_exp
from leadline.objective.segments import segment_mean, segment_sum

SEGMENTS = torch.tensor([0, 0, 2, 0, 2])  # segment 1 and 3 are empty; tokens of a segment need not be neighbours
VALUES = torch.tensor([1.0, 2.0, 10.0, 6.0, 20.0])


def test_a_segment_sum_adds_what_belongs_together_and_is_0_where_nothing_does():
    assert segment_sum(VALUES, SEGMENTS, 4).tolist() == [9.0, 0.0, 30.0, 0.0]


def test_a_segment_mean_divides_by_the_segments_own_count():
    assert segment_mean(VALUES, SEGMENTS, 4).tolist() == [3.0, 0.0, 15.0, 0.0]


def test_a_masked_segment_mean_counts_only_what_is_in_the_mask():
    mask = torch.tensor([True, False, False, True, False])
    assert segment_mean(VALUES, SEGMENTS, 4, mask).tolist() == [3.5, 0.0, 0.0, 0.0]


def test_no_tokens_at_all_give_zeros():
    empty = torch.zeros(0)
    assert segment_sum(empty, empty.long(), 2).tolist() == [0.0, 0.0]
    assert segment_mean(empty, empty.long(), 2).tolist() == [0.0, 0.0]


def test_the_gradient_of_a_segment_sum_is_1_and_of_a_mean_1_over_the_count():
    values = VALUES.clone().requires_grad_()
    segment_sum(values, SEGMENTS, 4).sum().backward()
    assert values.grad.tolist() == [1.0] * 5
    values.grad = None
    segment_mean(values, SEGMENTS, 4).sum().backward()
    assert values.grad == pytest.approx([1 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 2])


def test_a_nan_outside_the_mask_reaches_neither_the_mean_nor_the_gradient():
    values = torch.tensor([1.0, math.nan, math.inf], requires_grad=True)
    mean = segment_mean(values, torch.tensor([0, 0, 0]), 1, torch.tensor([True, False, False]))
    mean.sum().backward()
    assert mean.tolist() == [1.0]
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_a_nan_inside_a_segment_stays_in_that_segment():
    sums = segment_sum(torch.tensor([math.nan, 1.0]), torch.tensor([0, 1]), 2)
    assert sums[0].isnan() and sums[1] == 1.0


def test_the_dtype_of_the_values_is_kept():
    assert segment_sum(VALUES.double(), SEGMENTS, 4).dtype == torch.float64
    assert segment_mean(VALUES.bfloat16(), SEGMENTS, 4).dtype == torch.bfloat16


def test_values_and_segments_of_different_length_raise():
    with pytest.raises(TypeCheckError):
        segment_sum(VALUES[:4], SEGMENTS, 4)
    with pytest.raises(TypeCheckError):
        segment_mean(VALUES, SEGMENTS, 4, torch.ones(4, dtype=torch.bool))


def test_a_bounded_exp_is_exact_below_the_bound_and_finite_above():
    log_ratio = torch.tensor([-math.inf, -45.0, 0.0, 1.0, 20.0, 21.0, 1e30, math.inf], dtype=torch.float64)
    top = math.exp(MAX_LOG_RATIO)
    assert bounded_exp(log_ratio).tolist() == pytest.approx([0.0, math.exp(-45), 1.0, math.e, top, top, top, top])


def test_a_bounded_exp_keeps_nan_and_has_no_gradient_above_the_bound():
    log_ratio = torch.tensor([0.0, 25.0, -math.inf], requires_grad=True)
    bounded_exp(log_ratio).sum().backward()
    assert log_ratio.grad.tolist() == [1.0, 0.0, 0.0]
    assert bounded_exp(torch.tensor([math.nan])).isnan().all()
