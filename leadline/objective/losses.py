"""Policy losses: one loss per token. And what turns them into one number: each token's share.

Notation, per token: A advantage, rho = pi_theta / pi_old the policy ratio, sg(x) = x without gradient.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.objective.ratios import MAX_LOG_RATIO, bounded_exp
from leadline.objective.segments import segment_mean, segment_sum


class TokenLoss(NamedTuple):
    """All of axis "token"; 0 and False outside the loss mask."""

    loss: Float[Tensor, " token"]
    gain: Float[Tensor, " token"]
    """|d loss / d logprob| / |A|, a constant: 0 where the clip removed the gradient. For gspo, whose ratio belongs to a
    completion, this holds for sums over a completion (see `sequence_surrogate`)."""
    clipped: Bool[Tensor, " token"]
    """The clip acted. It removed the gradient, except in cispo, where it only bounds the coefficient."""


class LossTokens(NamedTuple):
    """What a loss sees; 0 outside the loss mask."""

    logprobs: Float[Tensor, " token"]
    log_ratio: Float[Tensor, " token"]
    """logprobs - old_logprobs = log rho."""
    advantages: Float[Tensor, " token"]
    completion_of_token: Int[Tensor, " token"]
    num_completions: int
    loss_mask: Bool[Tensor, " token"]


class Clip(NamedTuple):
    """rho is clipped to [1 - low, 1 + high]; above delta, where there is one, it has no gradient for any A."""

    low: float
    high: float
    delta: float | None


def clipped_surrogate(tokens: LossTokens, clip: Clip) -> TokenLoss:
    """-min(rho A, clamp(rho, 1 - low, 1 + high) A), rho first capped at delta (Schulman et al. 2017, PPO).

    A separate `high` is DAPO's clip-higher (Yu et al. 2025). Without `delta` nothing bounds rho when A < 0; with it the
    clip is two-sided (Ye et al. 2020, dual clip). Shared by grpo, dapo, dr_grpo and bnpo, which differ in aggregation.
    """
    return _surrogate(tokens.log_ratio, tokens.advantages, clip)


def sequence_surrogate(tokens: LossTokens, clip: Clip) -> TokenLoss:
    """The clipped surrogate of s = exp(mean of log rho over the completion's loss tokens) (Zheng et al. 2025, GSPO).

    All tokens of a completion have the same loss, and each pushes the mean: with c_t = share * weight of token t,
    d loss / d logprob = -A s sum(c) / n for each of n tokens. So gain = s, and sum(c |A| gain) over the completion
    equals the sum of |d loss / d logprob|, whatever c >= 0, as A is one number per completion.
    """
    mean = segment_mean(tokens.log_ratio, tokens.completion_of_token, tokens.num_completions, tokens.loss_mask)
    return _surrogate(mean[tokens.completion_of_token], tokens.advantages, clip)


def truncated_coefficient(tokens: LossTokens, clip: Clip) -> TokenLoss:
    """-sg(min(rho, 1 + high)) A logprob: every token keeps a gradient (MiniMax 2025, CISPO). No low, no delta."""
    ratio = bounded_exp(tokens.log_ratio.detach())
    coefficient = ratio.clamp(max=1 + clip.high)
    return TokenLoss(-coefficient * tokens.advantages * tokens.logprobs, coefficient, ratio > 1 + clip.high)


def reinforce(tokens: LossTokens, clip: Clip) -> TokenLoss:
    """-A logprob (Williams 1992): no ratio, so nothing to clip; right only on policy or with a rollout weight."""
    loss = -tokens.advantages * tokens.logprobs
    return TokenLoss(loss, torch.ones_like(loss), torch.zeros_like(tokens.loss_mask))


LOSSES: dict[str, Callable[[LossTokens, Clip], TokenLoss]] = {
    "grpo": clipped_surrogate,
    "dapo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "gspo": sequence_surrogate,
    "cispo": truncated_coefficient,
    "reinforce": reinforce,
}


def policy_loss(
    name: str,
    logprobs: Float[Tensor, " token"],
    old_logprobs: Float[Tensor, " token"],
    advantages: Float[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    loss_mask: Bool[Tensor, " token"],
    *,
    clip_low: float,
    clip_high: float,
    clip_delta: float | None,
) -> TokenLoss:
    """The loss `name` of each token, with gradient through `logprobs` only, and exactly 0 outside the loss mask.

    What lies outside the mask is never read: a NaN there reaches neither a loss nor a gradient. Inside it, finite
    inputs give finite losses and gradients (log rho is bounded above by `ratios.MAX_LOG_RATIO`, with no gradient
    beyond), and a NaN stays NaN for the guard to see.

    Raises ValueError for an unknown name.
    """
    if name not in LOSSES:
        raise ValueError(f"loss is {name!r}, but no such loss exists. Use one of: {', '.join(LOSSES)}.")
    inside = torch.where(loss_mask, logprobs, 0.0)
    tokens = LossTokens(
        logprobs=inside,
        log_ratio=inside - torch.where(loss_mask, old_logprobs.detach(), 0.0),
        advantages=torch.where(loss_mask, advantages.detach(), 0.0),
        completion_of_token=completion_of_token,
        num_completions=num_completions,
        loss_mask=loss_mask,
    )
    loss, gain, clipped = LOSSES[name](tokens, Clip(clip_low, clip_high, clip_delta))
    return TokenLoss(torch.where(loss_mask, loss, 0.0), torch.where(loss_mask, gain.detach(), 0.0), clipped & loss_mask)


def token_shares(
    aggregation: str,
    loss_mask: Bool[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    *,
    num_loss_tokens: int,
    num_loss_completions: int,
    max_tokens: int,
) -> Float[Tensor, " token"]:
    """Each token's share in loss = sum(share * weight * token_loss); 0 outside the loss mask.

        token_mean            1 / num_loss_tokens                                        DAPO
        minibatch_token_mean  the same; the caller counts the mini-batch's tokens        BNPO
        sequence_mean         1 / (num_loss_completions * loss tokens of its completion) GRPO
        constant              1 / (num_loss_completions * max_tokens)                    Dr. GRPO

    The counts are those of the whole step (mini-batch), so a sum over micro-batches is the whole, however completions
    are split among them. A completion itself must not be split.

    Raises ValueError for an unknown aggregation, and for a count of 0 that contradicts the loss mask.
    """
    denominators = {
        "token_mean": num_loss_tokens,
        "minibatch_token_mean": num_loss_tokens,
        "sequence_mean": num_loss_completions,
        "constant": num_loss_completions * max_tokens,
    }
    if aggregation not in denominators:
        raise ValueError(
            f"aggregation is {aggregation!r}, but no such aggregation exists. Use one of: {', '.join(denominators)}."
        )
    denominator = denominators[aggregation]
    if denominator == 0 and bool(loss_mask.any()):
        raise ValueError(
            f"The step is said to have {num_loss_tokens} loss tokens, {num_loss_completions} loss completions and at "
            f"most {max_tokens} tokens each, but loss_mask selects tokens. Count over the whole step."
        )
    shares = loss_mask.float() / max(denominator, 1)
    if aggregation == "sequence_mean":
        lengths = segment_sum(loss_mask.float(), completion_of_token, num_completions)
        shares = shares / lengths.clamp(min=1)[completion_of_token]
    return shares


def entropy_threshold(
    entropies: Float[Tensor, " token"], loss_mask: Bool[Tensor, " token"], quantile: float
) -> Float[Tensor, ""]:
    """The entropy of a loss token below which a share of about `quantile` of the loss tokens lies; NaN for none.

    Quantile 0 gives the smallest, 1 the largest, 0.8 the least of the top fifth (Wang et al. 2025, "80/20").
    Take it over the whole step, then apply `high_entropy_mask` to each part.
    """
    values = entropies.detach()[loss_mask]
    if not len(values):
        return values.new_full((), math.nan)
    return values.quantile(quantile, interpolation="higher")


def high_entropy_mask(
    entropies: Float[Tensor, " token"], loss_mask: Bool[Tensor, " token"], threshold: float
) -> Bool[Tensor, " token"]:
    """True for loss tokens with an entropy of at least `threshold`; -inf keeps all.

    A NaN entropy keeps its token: dropping it would hide a NaN in the logits from the guard.
    """
    return loss_mask & ~(entropies.detach() < threshold)


def _surrogate(log_ratio: Float[Tensor, " token"], advantages: Float[Tensor, " token"], clip: Clip) -> TokenLoss:
    log_cap = MAX_LOG_RATIO if clip.delta is None else min(math.log(clip.delta), MAX_LOG_RATIO)
    ratio = bounded_exp(log_ratio, log_cap)
    too_high = (ratio > 1 + clip.high) & (advantages > 0)
    too_low = (ratio < 1 - clip.low) & (advantages < 0)
    beyond = (log_ratio > log_cap) & (advantages != 0)
    # The minimum of the two surrogates, written as a choice: torch halves a minimum's gradient where both round alike.
    chosen = torch.where(too_high | too_low, ratio.clamp(1 - clip.low, 1 + clip.high), ratio)
    clipped = too_high | too_low | beyond
    return TokenLoss(-chosen * advantages, torch.where(clipped, 0.0, ratio), clipped)
