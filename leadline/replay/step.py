"""A recorded step under any settings of the loss: nothing is forwarded, the logprobs are those that were recorded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from leadline.config import Config
from leadline.objective.losses import entropy_threshold
from leadline.policy.batch import Batch, Minibatch, micro_batches, minibatches
from leadline.policy.optimizer import Outcome
from leadline.policy.step_loss import Before, Scores, Terms, TokenRecord, loss_shares, step_loss
from leadline.policy.update_metrics import OptimizerStep, summarize
from leadline.replay.record import Seen


@dataclass(frozen=True, slots=True)
class Pull:
    """The gradient of the loss of one optimizer step by what the model says of each token of the batch."""

    logprobs: Float[Tensor, " token"]
    entropies: Float[Tensor, " token"]

    @property
    def norm(self) -> float:
        """Of both together; NaN if it is not finite."""
        norm = float(torch.cat([self.logprobs, self.entropies]).double().norm())
        return norm if math.isfinite(norm) else math.nan


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the step would have measured, and how it would have pulled at the model."""

    metrics: dict[str, float]
    pulls: Mapping[int, Pull]
    """By optimizer step."""

    @property
    def pull_norm(self) -> float:
        """The largest of its optimizer steps; 0 if none had a gradient."""
        norms = [pull.norm for pull in self.pulls.values()]
        return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


class Unseen(Exception):
    """The settings train or measure tokens of which the record has no logprob."""


def replay_step(batch: Batch, config: Config, seen: Mapping[int, Seen], *, as_recorded: bool = False) -> Replayed:
    """The step's metrics and gradients under `config`, each optimizer step at the logprobs that were recorded for it.

    With `as_recorded` the outcomes of the optimizer are the recorded ones; else a step counts as discarded if its loss or
    its gradient is not finite. Raises Unseen.
    """
    steps, pulls = [], {}
    parts = [
        m for _ in range(config.optimizer.epochs_per_batch) for m in minibatches(batch, config.optimizer.minibatches)
    ]
    for place, minibatch in enumerate(parts):
        if not minibatch.forwarded:
            steps.append(OptimizerStep(Terms(), None, None))
            continue
        if place not in seen:
            raise Unseen(f"of optimizer step {place + 1} nothing was recorded")
        step, pulls[place] = _optimizer_step(batch, minibatch, config, seen[place], as_recorded)
        steps.append(step)
    update = summarize(batch, steps, config, math.nan, {})
    return Replayed(update.metrics, pulls)


def _optimizer_step(
    batch: Batch, minibatch: Minibatch, config: Config, seen: Seen, as_recorded: bool
) -> tuple[OptimizerStep, Pull]:
    before = _before(batch, minibatch, config, seen)
    shares = loss_shares(batch, minibatch, config)
    pull = Pull(torch.zeros(len(batch.token_ids)), torch.zeros(len(batch.token_ids)))
    terms, records = Terms(), []
    for micro in micro_batches(batch, minibatch.forwarded, config.optimizer.first_tokens_per_micro):
        tokens = batch.tokens_of(micro)
        scores = Scores(*(s[tokens].requires_grad_() for s in (seen.scores.logprobs, seen.scores.entropies)))
        loss, micro_terms, record = step_loss(config.objective, batch, micro, scores, before, shares)
        loss.backward()
        for gradient, score in ((pull.logprobs, scores.logprobs), (pull.entropies, scores.entropies)):
            if score.grad is not None:
                gradient[tokens] = score.grad
        terms += micro_terms
        records.append(record)
    finite = math.isfinite(terms.total) and math.isfinite(pull.norm)
    outcome = seen.outcome if as_recorded else Outcome(not finite, math.nan, math.nan, math.nan)
    return OptimizerStep(terms, TokenRecord.concatenate(records), outcome), pull


def _before(batch: Batch, minibatch: Minibatch, config: Config, seen: Seen) -> Before:
    """What the update would have known before this optimizer step. Raises Unseen."""
    objective, tokens = config.objective, batch.tokens_of(minibatch.forwarded)
    if missing := int((~seen.forwarded[tokens]).sum()):
        raise Unseen(f"{missing} of its tokens were not forwarded")
    if objective.beta > 0 and bool(seen.ref_logprobs[tokens].isnan().all()):
        raise Unseen("there are no logprobs of a reference")
    threshold = -math.inf
    if objective.entropy_quantile > 0:
        inside = batch.loss_mask & ~seen.scores.entropies.isnan()
        threshold = float(entropy_threshold(seen.scores.entropies, inside, objective.entropy_quantile))
    return Before(seen.old_logprobs, seen.ref_logprobs if objective.beta > 0 else None, threshold)
