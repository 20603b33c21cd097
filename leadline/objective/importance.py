"""Rollout weights pi_old / mu: what corrects for an engine that samples from another distribution than it is trained.

The engine (mu) and the trainer (pi_old) give the same token different log-probabilities: other kernels, other
precision, older weights. The policy gradient over tokens sampled from mu is unbiased for pi_old when each is weighted
with pi_old / mu; the levels and actions trade that bias for variance (Yao et al. 2025, Liu et al. 2025).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.objective.ratios import MAX_LOG_RATIO, bounded_exp
from leadline.objective.segments import segment_mean, segment_sum

LEVELS = ("token", "sequence", "geometric")
ACTIONS = ("truncate", "mask", "off")


class RolloutWeights(NamedTuple):
    """All of axis "token"; none has a gradient."""

    weights: Float[Tensor, " token"]
    """What multiplies the token's loss."""
    log_ratio: Float[Tensor, " token"]
    """log pi_old - log mu, raw: before level, bound and action. NaN where the engine did not score the token."""
    masked: Bool[Tensor, " token"]
    """The weight was set to 0 by a bound or the veto."""
    truncated: Bool[Tensor, " token"]
    """The weight was set to a bound."""


def rollout_weights(
    old_logprobs: Float[Tensor, " token"],
    rollout_logprobs: Float[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    *,
    level: str,
    action: str,
    low: float,
    high: float,
    veto: float,
) -> RolloutWeights:
    """Constant weights pi_old / mu within [low, high] or 0, and exactly 1 for a token that the engine did not score.

    With l_t = log pi_old - log mu over the scored tokens of a completion, the weight before bounds is

        token      exp(l_t)                  biased by what it ignores, variance bounded by `high`
        sequence   exp(sum of l)             unbiased; a constant offset grows with the length
        geometric  exp(mean of l)            free of length

    and the action outside [low, high] is `truncate` (to the bound), `mask` (to 0: the token, or at the other two
    levels the whole completion) or `off` (every weight is 1, nothing is masked). A veto above 0 masks a whole
    completion for one scored token with exp(l_t) < veto, under any action but off.

    NaN in `rollout_logprobs` = unscored: excluded from every sum and mean, weight exactly 1 in all modes, unless its
    completion is masked as a whole. Infinite log-probabilities give finite weights: a log ratio above
    `ratios.MAX_LOG_RATIO` counts as that, of a token and of a completion, and equal log-probabilities have ratio 1 even
    if both are -inf. A NaN in `old_logprobs` stays NaN: it is a fault of the trainer, which its guard must see.

    Raises ValueError for an unknown level or action.
    """
    _check("level", level, LEVELS)
    _check("action", action, ACTIONS)
    old, rollout = old_logprobs.detach(), rollout_logprobs.detach()
    scored = ~rollout.isnan()
    log_ratio = torch.where(old == rollout, 0.0, old - rollout)
    nothing = torch.zeros_like(scored)
    if action == "off":
        return RolloutWeights(torch.ones_like(log_ratio), log_ratio, nothing, nothing)

    # Bounded before it is summed: +inf and -inf in one completion would be NaN. So -inf wins, and the weight is 0.
    safe = torch.where(scored, log_ratio.clamp(max=MAX_LOG_RATIO), 0.0)
    weight = bounded_exp(_log_weight(safe, scored, completion_of_token, num_completions, level))
    outside = scored & ((weight < low) | (weight > high))
    vetoed = scored & (bounded_exp(safe) < veto)
    masked = _whole(vetoed, completion_of_token, num_completions)
    if action == "mask":
        masked |= outside if level == "token" else _whole(outside, completion_of_token, num_completions)
    bounded = torch.where(scored, weight.clamp(low, high), 1.0)
    return RolloutWeights(torch.where(masked, 0.0, bounded), log_ratio, masked, outside & ~masked)


def effective_sample_size(ratios: Float[Tensor, " token"]) -> Float[Tensor, ""]:
    """(sum w)^2 / (n sum w^2) in (0, 1]: the share of tokens that the weights leave in effect (Kish 1965).

    1 for equal weights, 1/n if one token carries all. NaN for no tokens, or if all weights are 0.
    """
    exact = ratios.double()
    return (exact.sum().square() / (len(ratios) * exact.square().sum())).to(ratios.dtype)


def _log_weight(
    log_ratio: Float[Tensor, " token"],
    scored: Bool[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    level: str,
) -> Float[Tensor, " token"]:
    if level == "token":
        return log_ratio
    if level == "sequence":
        return segment_sum(log_ratio, completion_of_token, num_completions)[completion_of_token]
    return segment_mean(log_ratio, completion_of_token, num_completions, scored)[completion_of_token]


def _whole(
    flags: Bool[Tensor, " token"], completion_of_token: Int[Tensor, " token"], num_completions: int
) -> Bool[Tensor, " token"]:
    """True for all tokens of a completion that has a flagged token."""
    return (segment_sum(flags.float(), completion_of_token, num_completions) > 0)[completion_of_token]


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, but no such importance {name} exists. Use one of: {', '.join(known)}.")
