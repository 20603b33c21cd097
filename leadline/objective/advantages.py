"""Rewards -> advantages: how much better a completion is than the others of its group."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.objective.segments import segment_mean, segment_sum

SCALINGS = ("group_std", "batch_std", "none", "leave_one_out")

ROUNDING = 1e-6
"""A reward this close to its group's mean, relative to the group's largest |reward|, counts as equal to it. Rewards
are float32 sums of components: equal ones come out up to a few 1e-7 apart, which a std would blow up to +-1."""


def group_advantages(
    rewards: Float[Tensor, " completion"],
    group_of_completion: Int[Tensor, " completion"],
    *,
    scaling: str,
    epsilon: float,
) -> Float[Tensor, " completion"]:
    """Rewards minus the mean reward of their group, scaled; exactly 0 where there is nothing to compare.

        group_std      (r - mean_group) / (std_group + epsilon)    Shao et al. 2024 (DeepSeekMath), GRPO
        batch_std      (r - mean_group) / (std_batch + epsilon)    Hu et al. 2025 (REINFORCE++)
        none           r - mean_group                              Liu et al. 2025 (Dr. GRPO)
        leave_one_out  r - mean of the group's other rewards       Ahmadian et al. 2024 (RLOO)

    Std is the sample std (n - 1). A reward that is NaN or infinite is no reward: it enters no mean, no std and no
    count, and has advantage 0. So have rewards equal to their group's mean within `ROUNDING`, hence all of a group
    with equal rewards, and the only finite reward of a group. Computed in float64, returned in the rewards' dtype.

    Raises ValueError for an unknown scaling.
    """
    if scaling not in SCALINGS:
        raise ValueError(
            f"scaling is {scaling!r}, but no such advantage scaling exists. Use one of: {', '.join(SCALINGS)}."
        )
    if not len(rewards):
        return rewards
    groups = int(group_of_completion.max()) + 1
    finite = rewards.isfinite()
    count = segment_sum(finite.double(), group_of_completion, groups)[group_of_completion]
    centred = _centred(rewards.double(), finite, group_of_completion, groups)
    if scaling == "leave_one_out":
        centred = centred * count / (count - 1).clamp(min=1)
    elif scaling == "group_std":
        squares = segment_sum(centred.square(), group_of_completion, groups)[group_of_completion]
        centred = centred / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)
    elif scaling == "batch_std":
        centred = centred / (_sample_std(rewards.double()[finite]) + epsilon)
    return centred.to(rewards.dtype)


def zero_signal_groups(
    advantages: Float[Tensor, " completion"], group_of_completion: Int[Tensor, " completion"], num_groups: int
) -> Bool[Tensor, " group"]:
    """True for a group none of whose advantages is nonzero: it cannot move the policy."""
    return segment_sum((advantages != 0).float(), group_of_completion, num_groups) == 0


def _centred(
    rewards: Float[Tensor, " completion"],
    finite: Bool[Tensor, " completion"],
    group_of_completion: Int[Tensor, " completion"],
    groups: int,
) -> Float[Tensor, " completion"]:
    """Finite rewards minus their group's mean, with what is only rounding set to 0; 0 for the others."""
    mean = segment_mean(rewards, group_of_completion, groups, finite)[group_of_completion]
    centred = torch.where(finite, rewards - mean, 0.0)
    magnitude = torch.where(finite, rewards.abs(), 0.0)
    largest = rewards.new_zeros(groups).scatter_reduce(0, group_of_completion, magnitude, "amax")[group_of_completion]
    return torch.where(centred.abs() <= ROUNDING * largest, 0.0, centred)


def _sample_std(values: Float[Tensor, " value"]) -> Float[Tensor, ""]:
    """Std with Bessel's correction; 0 for fewer than two values."""
    return values.std() if len(values) > 1 else values.new_zeros(())
