"""What goes wrong with the loss mask and with the aggregation of token losses."""

import torch
from torch import Tensor

from leadline.probes.code import loss
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.loss import inside_sum
from leadline.probes.code.mutations.loss_changes import (
    aggregation,
    inputs,
    masked_log_ratio,
    padding_in_numerator,
    summed,
    token_mean_over_width,
    unmasked,
)
from leadline.probes.code.search import Mutation


def _first_dropped(batch: ProbeBatch) -> Tensor:
    return batch.loss_mask & (torch.arange(batch.shape[1]) > 0)


def _last_dropped(batch: ProbeBatch) -> Tensor:
    return batch.loss_mask & (batch.loss_mask.cumsum(-1) < batch.loss_mask.sum(-1, keepdim=True))


def _one_more(batch: ProbeBatch) -> Tensor:
    return torch.arange(batch.shape[1]) <= batch.loss_mask.sum(-1, keepdim=True)


def _length_squared(x: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    return (inside_sum(x, mask) / mask.to(x.dtype).sum(-1).square()).mean()


def _by_group_size(x: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    return loss.token_mean(x, mask, batch) / batch.group_size


def _also_by_group_size(x: Tensor, mask: Tensor, batch: ProbeBatch) -> Tensor:
    return loss.sequence_mean(x, mask, batch) / batch.group_size


MUTATIONS = (
    Mutation(
        "mask_ignored",
        "the mask ignored",
        "Padding is trained and counted: the loss depends on how the batch was padded.",
        "Multiply with the mask and divide by its sum.",
        (unmasked,),
    ),
    Mutation(
        "padding_in_denominator",
        "padding counted in the denominator",
        "The step shrinks with the share of padding: one long completion makes all others count less.",
        "Divide by the mask's sum, not with mean() over the padded tensor.",
        (aggregation(token_mean_over_width, loss.token_mean), aggregation(loss.constant_width, loss.sequence_mean)),
    ),
    Mutation(
        "padding_in_numerator",
        "padding summed, though not counted",
        "Garbage in the padding is trained.",
        "Multiply with the mask before summing.",
        (padding_in_numerator,),
    ),
    Mutation(
        "mask_on_log_ratio",
        "the mask put on the log ratio only",
        "exp(0) = 1: every padding token adds its advantage to the loss, though no gradient.",
        "Mask the loss, not only the log ratio.",
        (masked_log_ratio,),
    ),
    Mutation(
        "first_token_dropped",
        "the first completion token left out of the mask",
        "The first token is never trained; often the shift by one was done twice.",
        "Shift the logits or the mask, once.",
        (inputs("loss_mask", _first_dropped),),
    ),
    Mutation(
        "last_token_dropped",
        "the last token (EOS) left out of the mask",
        "The policy is never taught when to stop: completions grow until they are cut.",
        "The policy sampled the terminator: train it.",
        (inputs("loss_mask", _last_dropped),),
    ),
    Mutation(
        "mask_too_long",
        "one padding token in the mask",
        "A token that was never sampled is trained.",
        "The mask ends with the terminator.",
        (inputs("loss_mask", _one_more),),
    ),
    Mutation(
        "token_mean_for_sequence_mean",
        "token mean in place of sequence mean",
        "Long completions count more than the loss it is meant to be says.",
        "Divide by each completion's own length, then take the mean over completions.",
        (aggregation(loss.token_mean, loss.sequence_mean),),
    ),
    Mutation(
        "sequence_mean_for_token_mean",
        "sequence mean in place of token mean",
        "A token of a long completion counts less: long wrong answers are hardly punished.",
        "Divide the sum over all tokens by the number of all tokens.",
        (aggregation(loss.sequence_mean, loss.token_mean),),
    ),
    Mutation(
        "width_for_limit",
        "the width of the batch in place of the constant denominator",
        "The step depends on the longest completion that happens to be in the batch.",
        "Divide by the limit of the generation.",
        (aggregation(loss.constant_width, loss.constant),),
    ),
    Mutation(
        "not_normalised",
        "a sum in place of the mean",
        "The step grows with the batch: the learning rate no longer means what it says.",
        "Divide by the tokens (or completions) of the whole step.",
        (summed,),
    ),
    Mutation(
        "length_divided_twice",
        "each completion divided by its length twice",
        "Long completions hardly count.",
        "Divide once.",
        (aggregation(_length_squared, loss.sequence_mean),),
    ),
    Mutation(
        "divided_by_group_size",
        "one division by the group size too many",
        "The step is G times too small.",
        "The mean over completions already contains the group.",
        (aggregation(_by_group_size, loss.token_mean), aggregation(_also_by_group_size, loss.sequence_mean)),
    ),
)
