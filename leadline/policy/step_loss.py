"""The loss of some completions of a step, and a record of what happened to each of their tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.config import Config
from leadline.objective.importance import RolloutWeights, rollout_weights
from leadline.objective.kl import kl_divergence
from leadline.objective.losses import high_entropy_mask, policy_loss, token_shares
from leadline.policy.batch import Batch, Minibatch
from leadline.settings.objective import Objective


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of some tokens; entry t belongs to token t."""

    logprobs: Float[Tensor, " token"]
    entropies: Float[Tensor, " token"]


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of the batch's tokens before the first optimizer step; NaN where no model saw the token."""

    old_logprobs: Float[Tensor, " token"] | None = None
    """None = there is one optimizer step, whose own logprobs they equal."""
    ref_logprobs: Float[Tensor, " token"] | None = None
    entropy_threshold: float = -math.inf
    """Tokens of lower entropy are not trained."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What happened to the forwarded tokens of one optimizer step. On the CPU, without gradient."""

    tokens: Int[Tensor, " token"]
    """Index into the batch's token axis."""
    logprobs: Float[Tensor, " token"]
    old_logprobs: Float[Tensor, " token"]
    ref_logprobs: Float[Tensor, " token"]
    """NaN without a reference."""
    entropies: Float[Tensor, " token"]
    log_ratio: Float[Tensor, " token"]
    """log pi_old - log mu before any bound; NaN = unscored."""
    weights: Float[Tensor, " token"]
    masked: Bool[Tensor, " token"]
    truncated: Bool[Tensor, " token"]
    clipped: Bool[Tensor, " token"]
    gain: Float[Tensor, " token"]
    trained: Bool[Tensor, " token"]
    """In the loss mask and above the entropy threshold."""
    shares: Float[Tensor, " token"]

    @classmethod
    def concatenate(cls, records: Sequence[Self]) -> Self:
        return cls(**{f.name: torch.cat([getattr(r, f.name) for r in records]) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a loss, as numbers."""

    policy: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(self.policy + other.policy, self.kl + other.kl, self.entropy + other.entropy)

    @property
    def total(self) -> float:
        return self.policy + self.kl + self.entropy


def loss_shares(batch: Batch, minibatch: Minibatch, config: Config) -> Float[Tensor, " token"]:
    """The share of each token of the batch in the loss of one optimizer step.

    Counts are those of the whole step (of the minibatch for `minibatch_token_mean`), divided by the number of
    minibatches, so that neither micro-batches nor minibatches change the scale of a gradient.
    """
    aggregation = config.objective.resolved_aggregation
    parts = config.optimizer.minibatches
    local = aggregation == "minibatch_token_mean"
    shares = token_shares(
        aggregation,
        batch.loss_mask,
        batch.completion_of_token,
        batch.num_completions,
        num_loss_tokens=max(1, minibatch.num_loss_tokens if local else int(batch.loss_mask.sum())),
        num_loss_completions=max(1, batch.num_loss_completions),
        max_tokens=config.sampling.max_tokens,
    )
    return shares if local else shares * parts


def step_loss(
    objective: Objective,
    batch: Batch,
    completions: Sequence[int],
    scores: Scores,
    before: Before,
    shares: Float[Tensor, " batch_token"],
) -> tuple[Float[Tensor, ""], Terms, TokenRecord]:
    """The part of these completions in the loss of the optimizer step, on the device of `scores`.

    loss = sum_t share_t [ w_t policy_loss_t + beta kl_t - entropy_bonus H_t ],  w_t = pi_old / mu, bounded
    """
    device = scores.logprobs.device
    tokens = batch.tokens_of(completions)
    lengths = batch.lengths[list(completions)]
    owner = torch.repeat_interleave(torch.arange(len(completions)), lengths).to(device)
    mask, share = batch.loss_mask[tokens].to(device), shares[tokens].to(device)
    old = scores.logprobs.detach() if before.old_logprobs is None else before.old_logprobs[tokens].to(device)
    trained = high_entropy_mask(scores.entropies.detach(), mask, before.entropy_threshold)  # NaN stays: the guard's
    weights = _bounded_weights(objective, old, batch.rollout_logprobs[tokens].to(device), owner, len(completions))
    token_loss = policy_loss(
        objective.loss,
        scores.logprobs,
        old,
        batch.token_advantages()[tokens].to(device),
        owner,
        len(completions),
        trained,
        clip_low=objective.clip_low,
        clip_high=objective.clip_low if objective.clip_high is None else objective.clip_high,
        clip_delta=objective.clip_delta,
    )
    ref = torch.full_like(old, math.nan) if before.ref_logprobs is None else before.ref_logprobs[tokens].to(device)

    policy_term = torch.where(trained, share * weights.weights * token_loss.loss, 0.0).sum()
    kl_term, entropy_term = _regularizers(objective, scores, ref, mask, share)
    record = TokenRecord(
        tokens=tokens,
        logprobs=_kept(scores.logprobs),
        old_logprobs=_kept(old),
        ref_logprobs=_kept(ref),
        entropies=_kept(scores.entropies),
        log_ratio=_kept(weights.log_ratio),
        weights=_kept(weights.weights),
        masked=_kept(weights.masked),
        truncated=_kept(weights.truncated),
        clipped=_kept(token_loss.clipped),
        gain=_kept(token_loss.gain),
        trained=_kept(trained),
        shares=_kept(share),
    )
    terms = Terms(*(float(term.detach()) for term in (policy_term, kl_term, entropy_term)))
    return policy_term + kl_term + entropy_term, terms, record


def _bounded_weights(
    objective: Objective,
    old_logprobs: Float[Tensor, " token"],
    rollout_logprobs: Float[Tensor, " token"],
    owner: Int[Tensor, " token"],
    completions: int,
) -> RolloutWeights:
    return rollout_weights(
        old_logprobs,
        rollout_logprobs,
        owner,
        completions,
        level=objective.importance_level,
        action=objective.importance_action,
        low=objective.importance_low,
        high=objective.importance_high,
        veto=objective.importance_veto,
    )


def _regularizers(
    objective: Objective,
    scores: Scores,
    ref_logprobs: Float[Tensor, " token"],
    mask: Bool[Tensor, " token"],
    share: Float[Tensor, " token"],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The KL term and the entropy term; 0 where the objective has none."""
    kl_term = entropy_term = torch.zeros((), device=share.device)
    if objective.beta > 0:
        kl = kl_divergence(scores.logprobs, ref_logprobs, objective.kl_estimator)
        kl_term = objective.beta * torch.where(mask, share * kl, 0.0).sum()
    if objective.entropy_bonus != 0:
        entropy_term = -objective.entropy_bonus * torch.where(mask, share * scores.entropies, 0.0).sum()
    return kl_term, entropy_term


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
