"""What goes wrong in a KL estimator, with d = ref_logprobs - logprobs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.kl import KlSteps, difference, token_mean
from leadline.probes.code.search import Mutation

Estimator = Callable[[Tensor], Tensor]

FORMS: tuple[tuple[Mutation, tuple[Estimator, ...]], ...] = (
    (
        Mutation(
            "kl_sign_of_d",
            "the sign of the linear term flipped",
            "e^d - 1 + d falls without limit as d falls: the policy is rewarded for leaving the reference.",
            "k3 is e^d - 1 - d with d = ref_logprobs - logprobs.",
            (),
        ),
        (lambda d: d.expm1() + d,),
    ),
    (
        Mutation(
            "kl_without_one",
            "k3 without the -1",
            "A policy that equals its reference shows a KL of 1: the metric is wrong, the gradient right.",
            "k3 is e^d - 1 - d.",
            (),
        ),
        (lambda d: d.exp() - d,),
    ),
    (
        Mutation(
            "kl_without_d",
            "k3 without the -d",
            "e^d - 1 has a gradient at the reference: it pushes every sampled token up.",
            "k3 is e^d - 1 - d.",
            (),
        ),
        (lambda d: d.expm1(), lambda d: d.exp()),
    ),
    (
        Mutation(
            "kl_half_missing",
            "k2 without the half",
            "The penalty is twice what beta says.",
            "k2 is d^2 / 2.",
            (),
        ),
        (lambda d: d.square(),),
    ),
)
"""The mutation, without its changes, and the estimators it stands for: the loss uses the same."""

DIRECTION = Mutation(
    "kl_direction",
    "the direction swapped (d = logprobs - ref_logprobs)",
    "It estimates another divergence, and k1 has the wrong sign.",
    "d is ref_logprobs - logprobs for tokens that the policy sampled.",
    (),
)


def _estimator(new: Estimator) -> Callable[[KlSteps], KlSteps]:
    return lambda steps: replace(steps, estimator=new)


def _difference(new: Callable[[ProbeBatch], Tensor]) -> Callable[[KlSteps], KlSteps]:
    return lambda steps: replace(steps, difference=new)


def _unmasked(steps: KlSteps) -> KlSteps:
    return replace(steps, aggregate=lambda kl, mask: kl.mean()) if steps.aggregate is token_mean else steps


def _padding_counted(steps: KlSteps) -> KlSteps:
    if steps.aggregate is not token_mean:
        return steps
    return replace(steps, aggregate=lambda kl, mask: torch.where(mask, kl, 0).mean())


MUTATIONS = (
    Mutation(
        DIRECTION.name,
        DIRECTION.phrase,
        DIRECTION.consequence,
        DIRECTION.fix,
        (_difference(lambda batch: -difference(batch)),),
    ),
    Mutation(
        "kl_negated",
        "the KL negated",
        "The policy is rewarded for leaving the reference.",
        "A KL estimate is added to the loss with a positive sign.",
        (lambda steps: replace(steps, finish=torch.neg),),
    ),
    *(Mutation(m.name, m.phrase, m.consequence, m.fix, tuple(map(_estimator, forms))) for m, forms in FORMS),
    Mutation(
        "kl_in_probabilities",
        "exp of the log-probabilities subtracted",
        "A difference of probabilities is no divergence: rare tokens do not count.",
        "Work with log-probabilities.",
        (_difference(lambda batch: batch.ref_logprobs.exp() - batch.logprobs.exp()),),
    ),
    Mutation(
        "kl_weighted_by_probability",
        "each token weighted with its probability again",
        "The tokens were sampled, which already weights them: likely tokens count twice.",
        "Average the estimate over the sampled tokens.",
        (lambda steps: replace(steps, estimator=lambda d: d, difference=_weighted),),
    ),
    Mutation(
        "kl_detached",
        "no gradient",
        "The KL is a number in the loss that holds nothing.",
        "Compute it from logprobs with their graph; only the reference is constant.",
        (_difference(lambda batch: batch.ref_logprobs - batch.logprobs.detach()),),
    ),
    Mutation(
        "ref_logprobs_shifted",
        "ref_logprobs shifted by one",
        "The KL compares two different tokens: it is large from the first step.",
        "Align both: entry t is the logprob of token t, from the logits at t - 1.",
        (
            _difference(lambda batch: torch.roll(batch.ref_logprobs, 1, 1) - batch.logprobs),
            _difference(lambda batch: torch.roll(batch.ref_logprobs, -1, 1) - batch.logprobs),
        ),
    ),
    Mutation(
        "mask_ignored",
        "the mask ignored",
        "Garbage in the padding enters the KL.",
        "Multiply with the mask and divide by its sum.",
        (_unmasked,),
    ),
    Mutation(
        "padding_in_denominator",
        "padding counted in the denominator",
        "The KL shrinks with the share of padding.",
        "Divide by the mask's sum, not with mean() over the padded tensor.",
        (_padding_counted,),
    ),
)


def _weighted(batch: ProbeBatch) -> Tensor:
    return batch.logprobs.exp() * (batch.logprobs - batch.ref_logprobs)
