"""What goes wrong between log-probabilities and the policy ratio, and with the graph behind it."""

from dataclasses import replace

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.loss import LossSteps, bounded_exp, inside_sum
from leadline.probes.code.mutations.loss_changes import clipped_step, inputs, sequence_level, shifts, step
from leadline.probes.code.search import Mutation


def _sequence_sum(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    return inside_sum(log_ratio, batch.loss_mask)[:, None].expand_as(log_ratio)


def _mean_of_everything(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    return log_ratio.mean(-1, keepdim=True).expand_as(log_ratio)


def _mean_over_width(log_ratio: Tensor, batch: ProbeBatch) -> Tensor:
    return (inside_sum(log_ratio, batch.loss_mask) / log_ratio.shape[1])[:, None].expand_as(log_ratio)


def _quotient(steps: LossSteps) -> LossSteps:
    return replace(steps, log_ratio=lambda batch: batch.logprobs / batch.old_logprobs, ratio=lambda quotient: quotient)


MUTATIONS = (
    Mutation(
        "old_logprobs_shifted",
        "old_logprobs shifted by one",
        "Each ratio compares two different tokens: the clip eats the signal.",
        "Align both: entry t is the logprob of token t, from the logits at t - 1.",
        shifts("old_logprobs"),
    ),
    Mutation(
        "logprobs_shifted",
        "logprobs shifted by one",
        "Each ratio compares two different tokens, and the gradient goes to the neighbour.",
        "Align both: entry t is the logprob of token t, from the logits at t - 1.",
        shifts("logprobs"),
    ),
    Mutation(
        "old_logprobs_replaced",
        "the current logprobs in place of old_logprobs",
        "The ratio is always 1: nothing is ever clipped, and stale batches are trained as if fresh.",
        "Use the logprobs that were stored when the step began.",
        (inputs("old_logprobs", lambda batch: batch.logprobs.detach()),),
    ),
    Mutation(
        "old_logprobs_are_the_references",
        "the reference's logprobs in place of old_logprobs",
        "The clip holds the policy at the reference: after some steps nearly every token is clipped.",
        "old_logprobs are the policy's own, from the start of the step.",
        (inputs("old_logprobs", lambda batch: batch.ref_logprobs),),
    ),
    Mutation(
        "log_ratio_inverted",
        "the ratio inverted (old / new)",
        "The gradient has the wrong sign, and the clip acts on the wrong side.",
        "Take exp(logprobs - old_logprobs).",
        (clipped_step("log_ratio", lambda batch: batch.old_logprobs - batch.logprobs),),
    ),
    Mutation(
        "exp_missing",
        "the log ratio in place of the ratio",
        "It is 0 where it should be 1: the clip cuts nearly everything.",
        "Take exp of the difference of the log-probabilities.",
        (step("ratio", lambda log_ratio: log_ratio),),
    ),
    Mutation(
        "ratio_linearised",
        "1 + log ratio in place of the ratio",
        "Right near 1 only: far from it the ratio is wrong, and may be negative.",
        "Take exp of the difference of the log-probabilities.",
        (step("ratio", lambda log_ratio: 1 + log_ratio),),
    ),
    Mutation(
        "ratio_of_logprobs",
        "a quotient of log-probabilities in place of their difference",
        "new / old of log-probabilities is no ratio of probabilities: likelier tokens look less likely.",
        "Subtract log-probabilities, then take exp.",
        (_quotient,),
    ),
    Mutation(
        "graph_cut",
        "the graph cut",
        "The loss has a value and no gradient: the policy never changes.",
        "Remove .item(), .tolist(), .detach(), torch.no_grad() or the numpy round trip between logprobs and loss.",
        (step("finish", torch.Tensor.detach),),
    ),
    Mutation(
        "ratio_detached",
        "the ratio detached",
        "The policy term has a value and no gradient: training does nothing, or only the KL term acts.",
        "Detach old_logprobs only; logprobs keep their graph.",
        (clipped_step("ratio", lambda log_ratio: bounded_exp(log_ratio).detach()),),
    ),
    Mutation(
        "sequence_ratio_summed",
        "the sequence ratio summed instead of averaged",
        "The ratio grows with the length: long completions are all clipped.",
        "GSPO takes the mean of the log ratios over the completion's tokens.",
        (sequence_level(_sequence_sum),),
    ),
    Mutation(
        "sequence_ratio_over_padding",
        "the sequence ratio averaged over padding too",
        "The ratio is diluted or polluted by padding.",
        "Divide the masked sum by the completion's own length.",
        (sequence_level(_mean_of_everything), sequence_level(_mean_over_width)),
    ),
)
