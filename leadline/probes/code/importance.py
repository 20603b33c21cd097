"""Rollout weights pi_old / mu in exchangeable steps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.loss import bounded_exp
from leadline.probes.code.search import Variant

CAPS = (2.0, 3.0, 5.0, 10.0, 1.5)
"""Tried where a function has its own upper bound."""


@dataclass(frozen=True, slots=True)
class WeightSteps:
    """bound(exp(level(log pi_old - log mu))): constant weights, one a token."""

    low: float
    high: float
    inputs: Callable[[ProbeBatch], ProbeBatch]
    log_ratio: Callable[[ProbeBatch], Tensor]
    level: Callable[[Tensor, ProbeBatch], Tensor]
    ratio: Callable[[Tensor], Tensor]
    bound: Callable[[Tensor, float, float], Tensor]
    select: Callable[[Tensor, ProbeBatch], Tensor]

    def __call__(self, batch: ProbeBatch) -> Tensor:
        batch = self.inputs(batch)
        ratio = self.ratio(self.level(self.log_ratio(batch), batch))
        return self.select(self.bound(ratio, self.low, self.high), batch)


def by_token(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    """Each token its own."""
    return log_ratio


def by_sequence(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    """The sum over the completion's tokens."""
    return torch.where(batch.loss_mask, log_ratio, 0).sum(-1, keepdim=True).expand_as(log_ratio)


def geometric(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    """The mean over the completion's tokens."""
    return by_sequence(log_ratio, batch) / batch.lengths.clamp(min=1)[:, None]


LEVELS = {"token": by_token, "sequence": by_sequence, "geometric": geometric}


def truncated(ratio: Tensor, low: float, high: float) -> Tensor:
    """To the bound."""
    return ratio.clamp(low, high)


def masked(ratio: Tensor, low: float, high: float) -> Tensor:
    """To 0 outside the bounds."""
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


ACTIONS = {"truncated": truncated, "masked": masked}


def inside(weights: Tensor, batch: ProbeBatch) -> Tensor:
    """Of the trained tokens."""
    return weights[batch.loss_mask]


def by_completion(weights: Tensor, batch: ProbeBatch) -> Tensor:
    """One weight a completion."""
    return weights[:, 0]


def variants(settings: Mapping[str, Any], *, per_token: bool) -> list[Variant]:
    """Each level and action, between the bounds given or usual ones; where none are given, without bounds, too."""
    lows = (settings["low"],) if settings.get("low") is not None else (-math.inf, 0.5, 1 / 3, 0.1)
    highs = (settings["high"],) if settings.get("high") is not None else CAPS
    form = inside if per_token else by_completion
    found = []
    for (level, of_level), (action, bound), low, high in product(LEVELS.items(), ACTIONS.items(), lows, highs):
        if per_token or level != "token":
            words = f"to [{low:g}, {high:g}]" if low > 0 else f"above {high:g}"
            found.append(_variant(f"{level} weights", f"{action} {words}", of_level, bound, low, high, form))
    if settings.get("high") is not None:
        return found
    free = [(level, of_level) for level, of_level in LEVELS.items() if per_token or level != "token"]
    return found + [
        _variant(f"{name} weights", "unbounded", of, truncated, -math.inf, math.inf, form) for name, of in free
    ]


def _variant(name: str, detail: str, level: Any, bound: Any, low: float, high: float, form: Any) -> Variant:
    steps = WeightSteps(low, high, _same, _log_ratio, level, bounded_exp, bound, form)
    return Variant(name, detail, steps, rank=0 if high in CAPS[:2] or high not in CAPS else 2)


def _log_ratio(batch: ProbeBatch) -> Tensor:
    return batch.old_logprobs - batch.rollout_logprobs


def _same(value: Any) -> Any:
    return value
