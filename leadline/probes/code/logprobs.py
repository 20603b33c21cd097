"""Token log-probabilities from logits in exchangeable steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.search import Variant


@dataclass(frozen=True, slots=True)
class LogprobSteps:
    """finish(pick(normalise(scale(logits)), token_ids)): [completion, position]."""

    temperature: float
    inputs: Callable[[ProbeBatch], ProbeBatch]
    scale: Callable[[Tensor, float], Tensor]
    normalise: Callable[[Tensor], Tensor]
    pick: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]
    select: Callable[[Tensor, ProbeBatch], Tensor]

    def __call__(self, batch: ProbeBatch) -> Tensor:
        batch = self.inputs(batch)
        scaled = self.scale(batch.logits, self.temperature)
        return self.select(self.finish(self.pick(self.normalise(scaled), batch.token_ids)), batch)


def log_softmax(logits: Tensor) -> Tensor:
    """Over the vocabulary, in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def pick(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """The entry of each token, along the vocabulary."""
    return logprobs.gather(-1, token_ids[..., None]).squeeze(-1)


def divided(logits: Tensor, temperature: float) -> Tensor:
    """The logits of the distribution that is sampled."""
    return logits / temperature


def inside(values: Tensor, batch: ProbeBatch) -> Tensor:
    """Of the trained tokens: what a function puts into the padding is its own affair."""
    return values[batch.loss_mask]


def summed(values: Tensor, batch: ProbeBatch) -> Tensor:
    """The log-probability of each completion."""
    return torch.where(batch.loss_mask, values, 0).sum(-1)


def averaged(values: Tensor, batch: ProbeBatch) -> Tensor:
    """The mean log-probability of each completion's tokens."""
    return summed(values, batch) / batch.lengths.clamp(min=1)


def variants(settings: Mapping[str, Any], *, per_token: bool) -> list[Variant]:
    """Per token; or per completion, summed or averaged."""
    forms = {"": inside} if per_token else {"summed by completion": summed, "averaged by completion": averaged}
    return [
        Variant(
            "log softmax",
            words,
            LogprobSteps(settings.get("temperature", 1.0), _same, divided, log_softmax, pick, _same, form),
        )
        for words, form in forms.items()
    ]


def _same(value: Any) -> Any:
    return value
