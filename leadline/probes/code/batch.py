"""Small seeded batches, ragged and with garbage in the padding, on which functions are compared."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

SHAPES = ((6, 6, 3), (8, 9, 4), (6, 12, 2))
"""Completions, longest completion, group size. The first is square: a broadcast along the wrong axis goes through."""

VOCABULARY = 5
"""Below every length: an index into the vocabulary is also one into the sequence, and the wrong axis goes through."""


@dataclass(frozen=True, slots=True)
class ProbeBatch:
    """Completions padded on the right. Log-probabilities in nats; the padding holds finite garbage, as it does in life.

    `logits` [completion, position, vocabulary] predict `token_ids` [completion, position] of the same position.
    """

    logits: Tensor
    token_ids: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_weights: Tensor
    loss_mask: Tensor
    """Bool: True = this token is trained."""
    rewards: Tensor
    advantages: Tensor
    group_of_completion: Tensor
    group_size: int
    max_tokens: int
    """The limit of the generation, above the longest completion of the batch."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.loss_mask.shape[0], self.loss_mask.shape[1]

    @property
    def lengths(self) -> Tensor:
        """Trained tokens of each completion, as floats."""
        return self.loss_mask.to(self.logprobs.dtype).sum(-1)

    def to(self, dtype: torch.dtype) -> Self:
        """The same with every float tensor rounded to `dtype`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        floats: dict[str, Any] = {
            name: v.to(dtype) for name, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()
        }
        return replace(self, **floats)

    def copy(self) -> Self:
        """The same numbers in tensors of its own."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return self.having(**{name: v.clone() for name, v in values.items() if isinstance(v, Tensor)})

    def having(self, **tensors: Any) -> Self:
        """The same with other tensors."""
        return replace(self, **tensors)


def seeded_batches(*, interleaved: bool = False) -> list[ProbeBatch]:
    """Three batches in float64. `interleaved` mixes the groups' completions and makes the groups differ in size."""
    return [_batch(seed, *shape, interleaved=interleaved) for seed, shape in enumerate(SHAPES)]


def _batch(seed: int, completions: int, longest: int, group_size: int, *, interleaved: bool) -> ProbeBatch:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    shape = (completions, longest)
    lengths = torch.randint(2, longest, (completions,), generator=random)
    lengths[int(torch.randint(completions, (1,), generator=random))] = longest
    old = -normal(*shape).abs() - 0.1
    drift = 0.35 * normal(*shape) * torch.where(torch.rand(shape, generator=random) < 0.15, 5.0, 1.0)
    groups = torch.arange(completions) // group_size
    if interleaved:
        groups = groups[torch.randperm(completions, generator=random)].clone()
        groups[groups == groups.max()] = torch.where(torch.arange(int((groups == groups.max()).sum())) == 0, 0, 1)
    gap = 0.4 * normal(*shape) * torch.where(torch.rand(shape, generator=random) < 0.15, 9.0, 1.0)
    rewards = normal(completions) + 0.5
    return ProbeBatch(
        logits=2 * normal(*shape, VOCABULARY),
        token_ids=torch.randint(VOCABULARY, shape, generator=random),
        logprobs=(old + drift).clamp(max=-1e-3),
        old_logprobs=old,
        rollout_logprobs=(old + gap).clamp(max=-1e-3),
        ref_logprobs=(old + 0.5 * normal(*shape)).clamp(max=-1e-3),
        rollout_weights=(0.4 * normal(*shape)).exp(),
        loss_mask=torch.arange(longest) < lengths[:, None],
        rewards=rewards,
        advantages=normal(completions),
        group_of_completion=groups,
        group_size=group_size,
        max_tokens=longest + 3,
    )
