"""From a new step to a change of `LossSteps`, and the wrong steps that need more than a line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code import loss
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.loss import LossSteps, inside_sum

Change = Callable[[LossSteps], LossSteps]
Surrogate = Callable[[Tensor, Tensor, ProbeBatch, LossSteps], Tensor]
Aggregate = Callable[[Tensor, Tensor, ProbeBatch], Tensor]


def surrogate(new: Surrogate, instead_of: Surrogate = loss.clipped) -> Change:
    """Another surrogate, where the variant has `instead_of`."""
    return lambda steps: replace(steps, surrogate=new) if steps.surrogate is instead_of else steps


def advantages(new: Callable[[Tensor], Tensor]) -> Change:
    """The clipped surrogate of changed advantages [completion, 1]."""
    return surrogate(lambda ratio, given, batch, steps: loss.clipped(ratio, new(given), batch, steps))


def inputs(name: str, new: Callable[[ProbeBatch], Tensor]) -> Change:
    """One changed tensor of the batch."""
    return lambda steps: replace(steps, inputs=lambda batch: batch.having(**{name: new(batch)}))


def step(name: str, new: Any) -> Change:
    """One step exchanged."""
    return lambda steps: replace(steps, **{name: new})


def clipped_step(name: str, new: Any) -> Change:
    """One step exchanged, where the loss is a surrogate of the ratio."""
    return lambda steps: replace(steps, **{name: new}) if steps.surrogate is loss.clipped else steps


def kl_step(name: str, new: Any) -> Change:
    """One step exchanged, where there is a KL term."""
    return lambda steps: replace(steps, **{name: new}) if steps.beta else steps


def sequence_level(new: Callable[[Tensor, ProbeBatch], Tensor]) -> Change:
    """Another sequence ratio, where the variant has one."""
    return lambda steps: replace(steps, level=new) if steps.level is loss.by_sequence else steps


def aggregation(new: Aggregate, instead_of: Aggregate) -> Change:
    """Another aggregation, where the variant has `instead_of`."""
    return lambda steps: replace(steps, aggregate=new) if steps.aggregate is instead_of else steps


def rolled(name: str, by: int, *, filled: bool) -> Callable[[ProbeBatch], Tensor]:
    """The tensor shifted along its tokens; `filled`: with 0 where nothing moves in, else around."""

    def shifted(batch: ProbeBatch) -> Tensor:
        values = torch.roll(getattr(batch, name), by, 1)
        edge = torch.arange(values.shape[1]) == (0 if by > 0 else values.shape[1] - 1)
        return torch.where(edge & torch.tensor(filled), torch.zeros_like(values), values)

    return shifted


def shifts(name: str) -> tuple[Change, ...]:
    """Shifted by one in either direction."""
    return tuple(inputs(name, rolled(name, by, filled=filled)) for by in (1, -1) for filled in (False, True))


def unmasked(steps: LossSteps) -> LossSteps:
    """Padding summed and counted."""
    aggregate = steps.aggregate
    if aggregate is loss.per_token:
        return steps
    return replace(steps, aggregate=lambda x, mask, batch: aggregate(x, torch.ones_like(mask), batch))


def padding_summed(aggregate: Aggregate) -> Aggregate | None:
    """The aggregation with the mask in the denominator only."""
    if aggregate is loss.token_mean:
        return lambda x, mask, batch: x.sum() / mask.to(x.dtype).sum()
    if aggregate is loss.sequence_mean:
        return lambda x, mask, batch: (x.sum(-1) / mask.to(x.dtype).sum(-1)).mean()
    return None


def padding_in_numerator(steps: LossSteps) -> LossSteps:
    """Padding summed, not counted."""
    aggregate = padding_summed(steps.aggregate)
    return steps if aggregate is None else replace(steps, aggregate=aggregate)


def masked_log_ratio(steps: LossSteps) -> LossSteps:
    """exp of (log ratio * mask): padding has ratio 1, and is then summed."""
    aggregate = padding_summed(steps.aggregate)
    if aggregate is None or steps.level is not loss.by_token:
        return steps
    log_ratio = steps.log_ratio
    return replace(
        steps, log_ratio=lambda batch: torch.where(batch.loss_mask, log_ratio(batch), 0), aggregate=aggregate
    )


def token_mean_over_width(x: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """mean() of the masked loss: padding is counted."""
    return inside_sum(x, mask).sum() / mask.numel()


def summed(steps: LossSteps) -> LossSteps:
    """A sum where a mean belongs."""
    if steps.aggregate is loss.per_token:
        return steps
    return replace(steps, aggregate=lambda x, mask, batch: inside_sum(x, mask).sum())
