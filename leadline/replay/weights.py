"""The policy as it was before a recorded step, where its weights are still there: it scores, and is pulled at."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from leadline.config import Config
from leadline.models import load_model
from leadline.policy.batch import Batch, micro_batches
from leadline.policy.optimizer import Outcome
from leadline.policy.policy import Policy, load_weights
from leadline.policy.step_loss import Scores
from leadline.replay.record import Recorded, Seen
from leadline.replay.step import Pull


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the weights before a step are: a checkpoint, or None for the model as the run began with it."""

    checkpoint: Path | None


def find_weights(record: Recorded) -> Weights | str:
    """The weights that made the step, or why they cannot be had."""
    if record.step == 1:
        return Weights(None)
    before = record.step - 1
    checkpoints = sorted((record.run / "checkpoints").glob("step_*/model"))
    wanted = record.run / "checkpoints" / f"step_{before:06d}"
    if (wanted / "model").is_dir():
        return Weights(wanted)
    there = ", ".join(str(int(path.parent.name.removeprefix("step_"))) for path in checkpoints) or "none"
    return f"the weights before step {record.step} are gone (checkpoints: {there}; step {before} is needed)"


def policy_before(record: Recorded, weights: Weights, config: Config) -> Policy:
    """The policy with those weights under `config`, which may compute in another dtype. Raises ModelError."""
    disable_progress_bar()
    policy = Policy(load_model(config.model, config.run.seed), config)
    if weights.checkpoint is not None and config.model.dtype != record.config.model.dtype:
        load_weights(policy.model, weights.checkpoint / "model", config.model.trust_remote_code)
    elif weights.checkpoint is not None:
        policy.restore(weights.checkpoint)
    return policy


def trained_again(record: Recorded, weights: Weights) -> dict[str, float]:
    """The metrics of the whole update made again, optimizer and all. Raises ModelError."""
    return policy_before(record, weights, record.config).update(record.batch(record.config)).metrics


@torch.no_grad()
def scored_again(policy: Policy, batch: Batch, config: Config) -> Mapping[int, Seen]:
    """What the policy says of the batch: of its first optimizer step, before which nothing has moved."""
    logprobs, entropies, ref = (torch.full((len(batch.token_ids),), math.nan) for _ in range(3))
    for micro in micro_batches(batch, batch.forwarded, config.optimizer.first_tokens_per_micro):
        tokens, scores = batch.tokens_of(micro), policy.logprobs(batch, micro)
        logprobs[tokens], entropies[tokens] = scores.logprobs.float().cpu(), scores.entropies.float().cpu()
        if config.objective.beta > 0:
            ref[tokens] = policy.logprobs(batch, micro, reference=True).logprobs.float().cpu()
    forwarded = torch.zeros(len(batch.token_ids), dtype=torch.bool)
    forwarded[batch.tokens_of(batch.forwarded)] = True
    nothing = Outcome(False, math.nan, math.nan, math.nan)
    return {0: Seen(forwarded, Scores(logprobs, entropies), logprobs, ref, nothing)}


def weight_gradient_norm(policy: Policy, batch: Batch, config: Config, pull: Pull) -> float:
    """Norm of the gradient by the weights of a loss that pulls so at the tokens; the weights stay as they are.

    d loss / d weights = sum_t pull_t d logprob_t / d weights (+ the same for entropies), by one forward and backward.
    """
    if not math.isfinite(pull.norm):
        return math.nan
    pulled = torch.unique(batch.completion_of_token[(pull.logprobs != 0) | (pull.entropies != 0)]).tolist()
    for micro in micro_batches(batch, pulled, config.optimizer.first_tokens_per_micro):
        tokens, scores = batch.tokens_of(micro), policy.logprobs(batch, micro)
        surrogate = (pull.logprobs[tokens].to(policy.device) * scores.logprobs).sum()
        if scores.entropies.requires_grad:
            surrogate = surrogate + (pull.entropies[tokens].to(policy.device) * scores.entropies).sum()
        surrogate.backward()
        policy.optimizer.collect()
    return policy.optimizer.step(math.nan, 0.0).grad_norm  # a loss that is not finite: the step is not taken
