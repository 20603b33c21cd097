"""Sums and means per segment (completion or group) of a flat axis."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def segment_sum(
    values: Float[Tensor, " token"], segment_of_token: Int[Tensor, " token"], num_segments: int
) -> Float[Tensor, " segment"]:
    """Entry s is the sum of the values whose segment is s: 0 for a segment without any.

    Differentiable in `values`. Segments may be empty and in any order.
    """
    return values.new_zeros(num_segments).index_add(0, segment_of_token, values)


def segment_mean(
    values: Float[Tensor, " token"],
    segment_of_token: Int[Tensor, " token"],
    num_segments: int,
    mask: Bool[Tensor, " token"] | None = None,
) -> Float[Tensor, " segment"]:
    """Entry s is the mean of the values in segment s where `mask` is True: 0 for a segment without any.

    A value outside the mask is never read, so a NaN there reaches neither the mean nor the gradient.
    """
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    total = segment_sum(torch.where(mask, values, 0), segment_of_token, num_segments)
    count = segment_sum(mask.to(values.dtype), segment_of_token, num_segments)
    return total / count.clamp(min=1)
