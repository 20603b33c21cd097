"""What goes wrong in rollout weights."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code import importance
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.importance import WeightSteps
from leadline.probes.code.search import Mutation

Change = Callable[[WeightSteps], WeightSteps]


def _step(name: str, new: Any) -> Change:
    return lambda steps: replace(steps, **{name: new})


def _level(old: Any, new: Callable[[Tensor, ProbeBatch], Tensor]) -> Change:
    return lambda steps: replace(steps, level=new) if steps.level is old else steps


def _bound(old: Any, new: Callable[[Tensor, float, float], Tensor]) -> Change:
    return lambda steps: replace(steps, bound=new) if steps.bound is old and steps.high < math.inf else steps


def _inputs(name: str, new: Callable[[ProbeBatch], Tensor]) -> Change:
    return _step("inputs", lambda batch: replace(batch, **{name: new(batch)}))


def _with_padding(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    return log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)


def _mean_with_padding(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    return log_ratio.mean(-1, keepdim=True).expand_as(log_ratio)


def _over_width(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    return importance.by_sequence(log_ratio, batch) / log_ratio.shape[1]


def _across_batch(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    total = torch.where(batch.loss_mask, log_ratio, 0).sum()
    return (total / batch.loss_mask.sum()).expand_as(log_ratio)


def _bounded_log(steps: WeightSteps) -> WeightSteps:
    """The bound put on the log ratio."""
    if steps.bound is not importance.truncated or steps.high == math.inf:
        return steps
    return replace(steps, bound=lambda ratio, low, high: ratio.log().clamp(max=high).exp())


MUTATIONS = (
    Mutation(
        "weight_inverted",
        "the ratio inverted (mu / pi_old)",
        "The correction makes the gap worse: its square is left.",
        "exp(old_logprobs - rollout_logprobs).",
        (_step("log_ratio", lambda batch: batch.rollout_logprobs - batch.old_logprobs),),
    ),
    Mutation(
        "current_for_old",
        "the current logprobs in place of old_logprobs",
        "The weight changes within a batch and overlaps with the policy ratio.",
        "The weight is pi_old / mu: a constant of the step.",
        (_inputs("old_logprobs", lambda batch: batch.logprobs),),
    ),
    Mutation(
        "cap_is_a_floor",
        "min and max exchanged: the cap is a floor",
        "Every weight is at least the cap: rare tokens dominate without limit.",
        "clamp(max=cap).",
        (_bound(importance.truncated, lambda ratio, low, high: ratio.clamp(min=high)),),
    ),
    Mutation(
        "cap_missing",
        "no upper bound",
        "One token that the engine found unlikely can carry the whole step.",
        "Truncate or mask above a cap (2 is usual).",
        (
            _bound(importance.truncated, lambda ratio, low, high: ratio.clamp(min=low)),
            _bound(importance.masked, lambda ratio, low, high: torch.where(ratio < low, 0.0, ratio)),
        ),
    ),
    Mutation(
        "mask_inverted",
        "the mask inverted: what lies inside the bounds is dropped",
        "Only the outliers are trained.",
        "Keep low <= ratio <= high.",
        (
            _bound(
                importance.masked,
                lambda ratio, low, high: torch.where((ratio < low) | (ratio > high), ratio, 0.0),
            ),
        ),
    ),
    Mutation(
        "kept_weights_are_one",
        "weight 1 for what is kept",
        "The gap inside the bounds is not corrected.",
        "Keep the ratio itself, or mean it: a mask without a weight.",
        (
            _bound(
                importance.masked,
                lambda ratio, low, high: torch.where((ratio < low) | (ratio > high), 0.0, torch.ones_like(ratio)),
            ),
        ),
    ),
    Mutation(
        "cap_on_log_ratio",
        "the cap put on the log ratio instead of the ratio",
        "A cap of 2 lets weights up to e^2 = 7.4 through.",
        "Cap the ratio, or cap the log ratio at log(cap).",
        (_bounded_log,),
    ),
    Mutation(
        "mask_ignored",
        "padding included in the sum",
        "The weight of a completion depends on garbage in its padding.",
        "Multiply the log ratios with the mask before summing.",
        (_level(importance.by_sequence, _with_padding), _level(importance.geometric, _mean_with_padding)),
    ),
    Mutation(
        "mean_over_width",
        "the mean taken over the padded width",
        "Short completions look closer to the engine than they are.",
        "Divide by the completion's own length.",
        (_level(importance.geometric, _over_width),),
    ),
    Mutation(
        "mean_over_batch",
        "one ratio for the whole batch",
        "No completion is corrected for its own gap.",
        "Sum or average within each completion.",
        (_level(importance.geometric, _across_batch),),
    ),
    Mutation(
        "exp_missing",
        "the log ratio in place of the ratio",
        "It is 0 where both agree: healthy tokens have no weight.",
        "Take exp of the difference of the log-probabilities.",
        (_step("ratio", lambda log_ratio: log_ratio),),
    ),
    Mutation(
        "rollout_logprobs_shifted",
        "rollout_logprobs shifted by one",
        "Each weight compares two different tokens.",
        "Align both: entry t is the logprob of token t.",
        (
            _inputs("rollout_logprobs", lambda batch: torch.roll(batch.rollout_logprobs, 1, 1)),
            _inputs("rollout_logprobs", lambda batch: torch.roll(batch.rollout_logprobs, -1, 1)),
        ),
    ),
    Mutation(
        "probability_difference",
        "a difference of probabilities in place of their ratio",
        "It is near 0 for rare tokens: they have no weight.",
        "exp(old_logprobs - rollout_logprobs).",
        (
            lambda steps: replace(
                steps,
                log_ratio=lambda batch: batch.old_logprobs.exp() - batch.rollout_logprobs.exp(),
                ratio=lambda difference: difference,
            ),
        ),
    ),
)
