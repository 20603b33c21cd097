"""What goes wrong in the surrogate and with the advantages in it."""

import torch
from torch import Tensor

from leadline.probes.code import loss
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.loss import LossSteps
from leadline.probes.code.mutations.loss_changes import advantages, inputs, step, surrogate
from leadline.probes.code.search import Mutation


def _bounded(ratio: Tensor, steps: LossSteps) -> Tensor:
    return ratio.clamp(1 - steps.clip_low, 1 + steps.clip_high)


def _maximum(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -torch.max(ratio * given, _bounded(ratio, steps) * given)


def _unclipped(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -ratio * given


def _only_clipped(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -_bounded(ratio, steps) * given


def _swapped(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -torch.min(ratio * given, ratio.clamp(1 - steps.clip_high, 1 + steps.clip_low) * given)


def _without_one(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -torch.min(ratio * given, ratio.clamp(-steps.clip_low, steps.clip_high) * given)


def _on_log_ratio(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -torch.min(ratio * given, ratio.log().clamp(-steps.clip_low, steps.clip_high).exp() * given)


def _on_product(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -torch.min(ratio * given, _bounded(ratio * given, steps))


def _attached(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    return -ratio.clamp(max=1 + steps.clip_high) * given * batch.logprobs


def _along_tokens(batch: ProbeBatch) -> Tensor:
    """[completion] against [completion, token] with no new axis: token t gets the advantage of completion t."""
    completions, longest = batch.shape
    # On other shapes it raises in life; here it only has to differ.
    return batch.advantages[None, :] if completions == longest else batch.advantages[:, None].flip(0)


def _whitened(batch: ProbeBatch) -> Tensor:
    return (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)


MUTATIONS = (
    Mutation(
        "sign_flipped",
        "the loss negated",
        "The optimizer minimises the objective: good completions become less likely.",
        "Return -min(ratio * A, clip(ratio) * A).",
        (step("finish", torch.neg),),
    ),
    Mutation(
        "advantage_sign",
        "the advantages negated",
        "Good completions are pushed down and bad ones up.",
        "Advantages are reward minus baseline; use them with their sign.",
        (inputs("advantages", lambda batch: -batch.advantages),),
    ),
    Mutation(
        "max_for_min",
        "max in place of min",
        "The clip is optimistic: large steps are rewarded instead of stopped, and ratios run away.",
        "Take the smaller of the two surrogates, then negate: -min(a, b), which is max(-a, -b).",
        (surrogate(_maximum),),
    ),
    Mutation(
        "clip_missing",
        "no clip",
        "Nothing bounds the step within a batch: after several optimizer steps ratios run away.",
        "Clamp the ratio to [1 - low, 1 + high] and take the minimum.",
        (surrogate(_unclipped),),
    ),
    Mutation(
        "minimum_missing",
        "the clipped surrogate alone, without the minimum",
        "A token that moved the wrong way beyond the clip has no gradient that could bring it back.",
        "Take min(ratio * A, clip(ratio) * A).",
        (surrogate(_only_clipped),),
    ),
    Mutation(
        "clip_bounds_swapped",
        "the clip bounds swapped",
        "Clip-higher becomes clip-lower: exploration is cut where it should be left.",
        "Clamp to [1 - low, 1 + high].",
        (surrogate(_swapped),),
    ),
    Mutation(
        "clip_bounds_without_one",
        "the ratio clipped to [-low, high] instead of [1 - low, 1 + high]",
        "Nearly every token with a positive advantage is clipped and has no gradient.",
        "The ratio is 1 where nothing changed: clamp around 1.",
        (surrogate(_without_one),),
    ),
    Mutation(
        "clip_on_log_ratio",
        "the log ratio clipped instead of the ratio",
        "The bounds are exp(-low) and exp(high), which are others than the settings say.",
        "Clamp exp(log ratio) to [1 - low, 1 + high].",
        (surrogate(_on_log_ratio),),
    ),
    Mutation(
        "clip_on_product",
        "ratio * advantage clipped instead of the ratio",
        "The size of the advantage decides whether a token is clipped.",
        "Clamp the ratio, then multiply with the advantage.",
        (surrogate(_on_product),),
    ),
    Mutation(
        "advantage_absolute",
        "|A| in place of A",
        "Every completion is reinforced, bad ones too.",
        "Keep the sign of the advantage.",
        (advantages(torch.abs),),
    ),
    Mutation(
        "negative_advantages_dropped",
        "negative advantages set to 0",
        "Nothing is unlearned: the loss is imitation of the better half.",
        "Keep negative advantages.",
        (advantages(torch.relu),),
    ),
    Mutation(
        "advantage_missing",
        "no advantage",
        "Rewards do not enter the loss: every completion is reinforced alike.",
        "Multiply the ratio with the advantage.",
        (advantages(torch.ones_like),),
    ),
    Mutation(
        "advantage_broadcast",
        "advantages broadcast along tokens instead of completions",
        "A token gets the advantage of another completion. It runs only where both axes have one length.",
        "Write advantages[:, None] (unsqueeze(1)) before multiplying.",
        (inputs("advantages", _along_tokens),),
    ),
    Mutation(
        "advantages_whitened_again",
        "the advantages whitened over the batch once more",
        "Baselines mix prompts: a completion that equals its group's mean gets a gradient.",
        "Normalise once, within the group, before the loss.",
        (inputs("advantages", _whitened),),
    ),
    Mutation(
        "coefficient_not_detached",
        "CISPO's coefficient not detached",
        "The gradient is (1 + logprob) times what it should be: unlikely tokens are pushed the wrong way.",
        "Detach the clipped ratio; only logprob carries the gradient.",
        (surrogate(_attached, loss.coefficient),),
    ),
)
