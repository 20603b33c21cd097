"""Group advantages in exchangeable steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.search import Variant

EPSILONS = (1e-4, 1e-6, 1e-8, 1e-5)
"""Tried where a function has its own: TRL's, verl's, and usual ones. All are rounding guards."""


@dataclass(frozen=True, slots=True)
class AdvantageSteps:
    """finish((r - baseline(r)) / (spread(r) + epsilon)): [completion]."""

    epsilon: float
    inputs: Callable[[ProbeBatch], ProbeBatch]
    baseline: Callable[[Tensor, ProbeBatch], Tensor]
    centre: Callable[[Tensor, Tensor], Tensor]
    spread: Callable[[Tensor, Tensor, ProbeBatch], Tensor]
    divide: Callable[[Tensor, Tensor, float], Tensor]
    finish: Callable[[Tensor], Tensor]

    def __call__(self, batch: ProbeBatch) -> Tensor:
        batch = self.inputs(batch)
        baseline = self.baseline(batch.rewards, batch)
        spread = self.spread(batch.rewards, baseline, batch)
        return self.finish(self.divide(self.centre(batch.rewards, baseline), spread, self.epsilon))


def of_group(values: Tensor, batch: ProbeBatch) -> Tensor:
    """The sum over each completion's group."""
    groups = int(batch.group_of_completion.max()) + 1
    sums = values.new_zeros(groups).index_add(0, batch.group_of_completion, values)
    return sums[batch.group_of_completion]


def count(batch: ProbeBatch) -> Tensor:
    """The size of each completion's group."""
    return of_group(torch.ones_like(batch.rewards), batch)


def group_mean(rewards: Tensor, batch: ProbeBatch) -> Tensor:
    """Of the completion's group."""
    return of_group(rewards, batch) / count(batch)


def mean_of_others(rewards: Tensor, batch: ProbeBatch) -> Tensor:
    """Leave-one-out (RLOO)."""
    return (of_group(rewards, batch) - rewards) / (count(batch) - 1).clamp(min=1)


def group_std(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    """Sample std (n - 1) of the completion's group."""
    squares = of_group((rewards - group_mean(rewards, batch)).square(), batch)
    return (squares / (count(batch) - 1).clamp(min=1)).sqrt()


def batch_std(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    """Sample std of all rewards."""
    return rewards.std().expand_as(rewards)


def centred_std(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    """Sample std of all centred rewards."""
    return (rewards - baseline).std().expand_as(rewards)


def no_spread(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    """Not scaled (Dr. GRPO)."""
    return torch.ones_like(rewards)


def divide(centred: Tensor, spread: Tensor, epsilon: float) -> Tensor:
    """With the epsilon outside the root."""
    return centred / (spread + epsilon)


FORMS = {
    "group_std": (group_mean, group_std),
    "none": (group_mean, no_spread),
    "leave_one_out": (mean_of_others, no_spread),
    "batch_std": (group_mean, batch_std),
    "batch_std of centred rewards": (group_mean, centred_std),
}
"""Named as leadline's `advantages.scaling`."""


def variants(settings: Mapping[str, Any]) -> list[Variant]:
    """Each scaling, with the epsilon given or a usual one."""
    epsilons = (settings["epsilon"],) if settings.get("epsilon") is not None else EPSILONS
    found = []
    for name, (baseline, spread) in FORMS.items():
        for epsilon in epsilons if spread is not no_spread else (0.0,):
            small = min(epsilon, 1e-3)  # a larger one is a bug, which the mutations name
            detail = f"epsilon {epsilon:g}" if epsilon else ""
            steps = AdvantageSteps(small, _same, baseline, torch.sub, spread, divide, _same)
            found.append(Variant(name, detail, steps))
    return found


def _same(value: Any) -> Any:
    return value
