"""The KL penalty in exchangeable steps, its right variants and its edges."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.objective.ratios import MAX_LOG_RATIO
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.search import Variant


@dataclass(frozen=True, slots=True)
class KlSteps:
    """aggregate(sign * estimator(d)), with d = ref_logprobs - logprobs."""

    inputs: Callable[[ProbeBatch], ProbeBatch]
    difference: Callable[[ProbeBatch], Tensor]
    estimator: Callable[[Tensor], Tensor]
    aggregate: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]

    def __call__(self, batch: ProbeBatch) -> Tensor:
        batch = self.inputs(batch)
        return self.finish(self.aggregate(self.estimator(self.difference(batch)), batch.loss_mask))


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k3": lambda d: d.clamp(max=MAX_LOG_RATIO).expm1() - d.clamp(max=MAX_LOG_RATIO),
    "k2": lambda d: d.square() / 2,
    "k1": torch.neg,
    "|k1|": torch.abs,
}
"""Of d, as `leadline.objective.kl` has them."""


def chosen(kl: Tensor, mask: Tensor) -> Tensor:
    """One value a trained token."""
    return kl[mask]


def token_mean(kl: Tensor, mask: Tensor) -> Tensor:
    """Over all trained tokens."""
    return torch.where(mask, kl, 0).sum() / mask.to(kl.dtype).sum().clamp(min=1)


def sequence_mean(kl: Tensor, mask: Tensor) -> Tensor:
    """The mean over completions of their token means."""
    return (torch.where(mask, kl, 0).sum(-1) / mask.to(kl.dtype).sum(-1).clamp(min=1)).mean()


def variants(settings: Mapping[str, Any], *, aggregated: bool) -> list[Variant]:
    """k1, k2, k3 and |k1|: of each token, or their mean."""
    forms = {"token mean": token_mean, "sequence mean": sequence_mean} if aggregated else {"": chosen}
    return [
        Variant(name, words, KlSteps(_same, difference, estimator, form, _same))
        for name, estimator in ESTIMATORS.items()
        for words, form in forms.items()
    ]


def difference(batch: ProbeBatch) -> Tensor:
    """d, with gradient through the policy alone."""
    return batch.ref_logprobs.detach() - batch.logprobs


def _same(value: Any) -> Any:
    return value
