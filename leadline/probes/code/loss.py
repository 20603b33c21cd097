"""The policy loss in exchangeable steps, and the variants of it that are right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from leadline.objective.ratios import MAX_LOG_RATIO
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.kl import ESTIMATORS, difference
from leadline.probes.code.search import Variant

Aggregate = Callable[[Tensor, Tensor, ProbeBatch], Tensor]
"""(token losses, mask, batch) -> one number, or the losses of the trained tokens."""


@dataclass(frozen=True, slots=True)
class LossSteps:
    """loss = finish(aggregate(weight * surrogate(ratio) + beta * kl)); each step may be exchanged for a wrong one."""

    clip_low: float
    clip_high: float
    delta: float | None
    beta: float
    inputs: Callable[[ProbeBatch], ProbeBatch]
    log_ratio: Callable[[ProbeBatch], Tensor]
    level: Callable[[Tensor, ProbeBatch], Tensor]
    """From the tokens' log ratios to those that the surrogate takes."""
    ratio: Callable[[Tensor], Tensor]
    surrogate: Callable[[Tensor, Tensor, ProbeBatch, "LossSteps"], Tensor]
    weight: Callable[[ProbeBatch], Tensor]
    kl_difference: Callable[[ProbeBatch], Tensor]
    kl_estimator: Callable[[Tensor], Tensor]
    kl_weight: Callable[[Tensor], Tensor]
    """Of the policy ratio: what multiplies the KL term."""
    total: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    aggregate: Aggregate
    finish: Callable[[Tensor], Tensor]

    def __call__(self, batch: ProbeBatch) -> Tensor:
        batch = self.inputs(batch)
        log_ratio = self.log_ratio(batch)
        ratio = self.ratio(self.level(log_ratio, batch))
        advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
        loss = self.surrogate(ratio, advantages, batch, self)
        kl = self.kl_estimator(self.kl_difference(batch)) * self.kl_weight(ratio)
        return self.finish(self.aggregate(self.total(loss, self.weight(batch), kl, self.beta), batch.loss_mask, batch))


# Steps ----------------------------------------------------------------------------------------------------------------


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Finite for any finite log ratio."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clipped(ratio: Tensor, advantages: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    """-min(rho A, clip(rho) A), rho capped at delta."""
    bounded = ratio.clamp(1 - steps.clip_low, 1 + steps.clip_high)
    free = ratio if steps.delta is None else ratio.clamp(max=steps.delta)
    return -torch.min(free * advantages, bounded * advantages)


def coefficient(ratio: Tensor, advantages: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    """CISPO: -sg(min(rho, 1 + high)) A logprob."""
    return -ratio.detach().clamp(max=1 + steps.clip_high) * advantages * batch.logprobs


def reinforce(ratio: Tensor, advantages: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    """-A logprob."""
    return -advantages * batch.logprobs


def by_token(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    """Each token its own ratio."""
    return log_ratio


def by_sequence(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    """GSPO: the mean log ratio of the completion's trained tokens."""
    inside = torch.where(batch.loss_mask, log_ratio, 0)
    return (inside.sum(-1) / batch.lengths.clamp(min=1))[:, None].expand_as(log_ratio)


def inside_sum(loss: Tensor, mask: Tensor) -> Tensor:
    """Sum over the trained tokens of each completion."""
    return torch.where(mask, loss, 0).sum(-1)


def token_mean(loss: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """Over all trained tokens."""
    return inside_sum(loss, mask).sum() / mask.to(loss.dtype).sum().clamp(min=1)


def sequence_mean(loss: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """The mean over completions of their token means."""
    return (inside_sum(loss, mask) / mask.to(loss.dtype).sum(-1).clamp(min=1)).mean()


def constant(loss: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """Dr. GRPO: over completions times the limit of the generation."""
    return inside_sum(loss, mask).mean() / batch.max_tokens


def constant_width(loss: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """As `constant`, with the width of the padded batch in place of the limit."""
    return inside_sum(loss, mask).mean() / mask.shape[1]


def sequence_sum(loss: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """The mean over completions of their token sums."""
    return inside_sum(loss, mask).mean()


def per_token(loss: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    """Not aggregated: the losses of the trained tokens."""
    return loss[mask]


def given_weight(batch: ProbeBatch) -> Tensor:
    """The rollout weights that the function was given."""
    return batch.rollout_weights


def no_weight(batch: ProbeBatch) -> Tensor:
    """No correction for the engine."""
    return torch.ones_like(batch.rollout_weights)


# Variants -------------------------------------------------------------------------------------------------------------

FAMILIES = {
    "grpo": (by_token, clipped, sequence_mean),
    "dapo": (by_token, clipped, token_mean),
    "dr_grpo": (by_token, clipped, constant),
    "gspo": (by_sequence, clipped, sequence_mean),
    "cispo": (by_token, coefficient, token_mean),
    "reinforce": (by_token, reinforce, token_mean),
}
"""What people mean by a name: level, surrogate, aggregation. bnpo is dapo within one mini-batch."""

AGGREGATIONS = {
    "token mean": token_mean,
    "sequence mean": sequence_mean,
    "constant denominator": constant,
    "padded width as denominator": constant_width,
    "sequence sum": sequence_sum,
}

CLIPS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (3e-4, 4e-4))
"""Tried where a function has its own: PPO's, DAPO's, two other usual ones, GSPO's."""

COEFFICIENT_CAPS = (0.28, 0.2, 1.0, 4.0)
"""Tried for CISPO's 1 + high where a function has its own."""

BETAS = (0.0, 0.04, 0.001, 0.01, 0.05, 0.1)


def variants(settings: Mapping[str, Any], *, aggregated: bool, weighted: bool) -> list[Variant]:
    """The right losses with these settings. What `settings` lacks the function has inside, so usual values are tried.

    `aggregated`: it returns one number, not one a token. `weighted`: it is given rollout weights.
    """
    found = []
    weight = given_weight if weighted else no_weight
    for (name, aggregation, aggregate), kl, delta in product(
        _named(settings, aggregated), _kl_terms(settings), _deltas(settings)
    ):
        level, surrogate, own = FAMILIES[name]
        for low, high in _clips(settings, surrogate):
            detail = ", ".join(part for part in (aggregation, _clip_words(surrogate, low, high, delta), kl[0]) if part)
            steps = LossSteps(
                clip_low=low, clip_high=high, delta=delta, beta=kl[1], inputs=_same, log_ratio=_log_ratio, level=level,
                ratio=bounded_exp, surrogate=surrogate, weight=weight, kl_difference=difference, kl_estimator=kl[2],
                kl_weight=kl[3], total=_total, aggregate=aggregate, finish=_same,
            )  # fmt: skip
            usual = delta == _deltas(settings)[0] and (low, high) in _clips(settings, surrogate)[:2]
            rank = 0 if usual and kl[4] and aggregate in (own, per_token) else 1 if usual else 2
            found.append(Variant(name, detail, steps, rank))
    return sorted(found, key=lambda variant: variant.rank)


def _named(settings: Mapping[str, Any], aggregated: bool) -> list[tuple[str, str, Aggregate]]:
    """(family, words, aggregation), each loss once: dapo and dr_grpo are grpo's surrogate, aggregated otherwise."""
    if not aggregated:
        return [(name, "one loss a token", per_token) for name in ("grpo", "gspo", "cispo", "reinforce")]
    # verl's seq-mean-token-sum-norm; elsewhere a mean over padding is a mistake.
    by_width = str(settings.get("aggregation", "")).endswith("norm")
    own: list[tuple[str, str, Aggregate]] = [(name, "", aggregate) for name, (_, _, aggregate) in FAMILIES.items()]
    others: list[tuple[str, str, Aggregate]] = [
        (name, words, aggregate)
        for name, (words, aggregate) in product(("grpo", "gspo", "cispo", "reinforce"), AGGREGATIONS.items())
        if aggregate is not FAMILIES[name][2]
        and not (name == "grpo" and aggregate in (token_mean, constant))
        and (by_width or aggregate is not constant_width)
    ]
    return own + others


def _kl_terms(settings: Mapping[str, Any]) -> list[tuple[str, float, Any, Any, bool]]:
    """(words, beta, estimator, what multiplies it, of rank 0)."""
    if "ref_logprobs" not in settings:
        return [("", 0.0, torch.zeros_like, _one, True)]
    betas = BETAS if settings.get("beta") is None else (settings["beta"],)
    terms = []
    for beta, name, scaled in product(betas, ("k3", "k1", "k2"), (False, True)):
        if beta == 0 and (name != "k3" or scaled):
            continue
        words = f"KL {name} with beta {beta:g}" + (" times the policy ratio" if scaled else "") if beta else "no KL"
        weight = _itself if scaled else _one
        terms.append((words, beta, ESTIMATORS[name], weight, name == "k3" and not scaled))
    return terms


def _clips(settings: Mapping[str, Any], surrogate: Any) -> tuple[tuple[float, float], ...]:
    low, high = settings.get("clip_low", settings.get("clip")), settings.get("clip_high", settings.get("clip"))
    if surrogate is reinforce:
        return ((0.0, 0.0),)
    if surrogate is coefficient:
        return tuple((0.0, cap) for cap in (COEFFICIENT_CAPS if high is None else (high, high - 1)))
    if low is None or high is None or settings.get("clip_unsure"):
        return CLIPS
    return ((low, high),)


def _deltas(settings: Mapping[str, Any]) -> tuple[float | None, ...]:
    return (settings["delta"],) if "delta" in settings else (None, 3.0)


def _clip_words(surrogate: Any, low: float, high: float, delta: float | None) -> str:
    if surrogate is reinforce:
        return ""
    if surrogate is coefficient:
        return f"cap {1 + high:g}"
    return f"clip {low:g} / {high:g}" + (f", delta {delta:g}" if delta else "")


def _log_ratio(batch: ProbeBatch) -> Tensor:
    return batch.logprobs - batch.old_logprobs.detach()


def _total(loss: Tensor, weight: Tensor, kl: Tensor, beta: float) -> Tensor:
    return weight * loss + beta * kl


def _same(value: Any) -> Any:
    return value


def _one(ratio: Tensor) -> Tensor:
    return torch.ones_like(ratio)


def _itself(ratio: Tensor) -> Tensor:
    return ratio
