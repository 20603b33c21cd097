"""What goes wrong with the KL term and the rollout weight of a loss."""

from dataclasses import replace

import torch
from torch import Tensor

from leadline.probes.code import loss
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.kl import difference
from leadline.probes.code.loss import LossSteps
from leadline.probes.code.mutations.kl import DIRECTION, FORMS
from leadline.probes.code.mutations.loss_changes import kl_step
from leadline.probes.code.search import Mutation


def _weighted(steps: LossSteps) -> bool:
    return steps.weight is loss.given_weight


def _weight_ignored(steps: LossSteps) -> LossSteps:
    return replace(steps, weight=loss.no_weight) if _weighted(steps) else steps


def _weight_inverted(steps: LossSteps) -> LossSteps:
    return replace(steps, weight=lambda batch: 1 / batch.rollout_weights) if _weighted(steps) else steps


def _weight_on_kl(steps: LossSteps) -> LossSteps:
    if not (_weighted(steps) and steps.beta):
        return steps
    return replace(steps, total=lambda loss, weight, kl, beta: weight * (loss + beta * kl))


def _detached_policy(batch: ProbeBatch) -> Tensor:
    return batch.ref_logprobs - batch.logprobs.detach()


def _old_for_policy(batch: ProbeBatch) -> Tensor:
    return batch.ref_logprobs - batch.old_logprobs


def _old_for_reference(batch: ProbeBatch) -> Tensor:
    return batch.old_logprobs - batch.logprobs


def _shifted_reference(batch: ProbeBatch) -> Tensor:
    return torch.roll(batch.ref_logprobs, 1, 1) - batch.logprobs


MUTATIONS = (
    Mutation(
        "kl_subtracted",
        "the KL term subtracted",
        "The policy is pushed away from the reference.",
        "The loss is minimised: add beta * KL.",
        (kl_step("total", lambda loss, weight, kl, beta: weight * loss - beta * kl),),
    ),
    Mutation(
        "beta_ignored",
        "beta ignored (the KL term with coefficient 1)",
        "The KL term dominates: the policy stays at the reference.",
        "Multiply the KL with beta.",
        (kl_step("total", lambda loss, weight, kl, beta: weight * loss + kl),),
    ),
    Mutation(
        "kl_missing",
        "the KL term left out",
        "Nothing holds the policy at the reference, whatever beta says.",
        "Add beta * KL to each token's loss.",
        (kl_step("total", lambda loss, weight, kl, beta: weight * loss),),
    ),
    *(
        Mutation(m.name, m.phrase, m.consequence, m.fix, tuple(kl_step("kl_estimator", form) for form in forms))
        for m, forms in FORMS
    ),
    Mutation(
        DIRECTION.name,
        DIRECTION.phrase,
        DIRECTION.consequence,
        DIRECTION.fix,
        (kl_step("kl_difference", lambda batch: -difference(batch)),),
    ),
    Mutation(
        "kl_detached",
        "the KL term without a gradient",
        "The KL is in the loss's value, and holds nothing.",
        "Compute the KL from logprobs with their graph; only the reference is constant.",
        (kl_step("kl_difference", _detached_policy),),
    ),
    Mutation(
        "kl_of_old_logprobs",
        "the KL of old_logprobs instead of logprobs",
        "The KL is that of the step's start: a constant without a gradient.",
        "Compare the current logprobs with the reference.",
        (kl_step("kl_difference", _old_for_policy),),
    ),
    Mutation(
        "old_for_reference",
        "old_logprobs in place of the reference's logprobs",
        "The policy is held at where it was a step ago: it drifts without limit.",
        "Compare with the frozen reference.",
        (kl_step("kl_difference", _old_for_reference),),
    ),
    Mutation(
        "ref_logprobs_shifted",
        "ref_logprobs shifted by one",
        "The KL compares two different tokens: it is large from the first step.",
        "Align both: entry t is the logprob of token t, from the logits at t - 1.",
        (kl_step("kl_difference", _shifted_reference),),
    ),
    Mutation(
        "weight_ignored",
        "the rollout weights ignored",
        "The gap between engine and trainer is not corrected, though it looks as if.",
        "Multiply the token losses with the weights.",
        (_weight_ignored,),
    ),
    Mutation(
        "weight_inverted",
        "the rollout weights inverted",
        "The correction makes the gap worse: its square is left.",
        "Multiply with pi_old / mu, not divide by it.",
        (_weight_inverted,),
    ),
    Mutation(
        "weight_on_kl",
        "the rollout weight on the KL term too",
        "A masked sequence is not held at the reference either.",
        "Weight the policy term, then add beta * KL; or mean it, and say so.",
        (_weight_on_kl,),
    ),
)
