"""What goes wrong between logits and the log-probability of a token."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.logprobs import LogprobSteps
from leadline.probes.code.search import Mutation

Change = Callable[[LogprobSteps], LogprobSteps]


def _step(name: str, new: Any) -> Change:
    return lambda steps: replace(steps, **{name: new})


def _scale(new: Callable[[Tensor, float], Tensor]) -> Change:
    return lambda steps: replace(steps, scale=new) if steps.temperature != 1 else steps


def _along_positions(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """gather(1, ...): the token id indexes the position, and the first vocabulary entry is taken."""
    return logprobs.gather(1, token_ids[..., None]).squeeze(-1)


def _half(dtype: torch.dtype) -> Change:
    """Everything in half precision, the result too."""
    return _step("normalise", lambda logits: logits.to(dtype).log_softmax(-1).to(logits.dtype))


def _logsumexp_in_half(dtype: torch.dtype) -> Change:
    """Only the normaliser in half precision."""
    return _step("normalise", lambda logits: logits - logits.to(dtype).logsumexp(-1, keepdim=True).to(logits.dtype))


def _shifted_ids(by: int) -> Change:
    def shifted(batch: ProbeBatch) -> ProbeBatch:
        return replace(batch, token_ids=torch.roll(batch.token_ids, by, 1))

    return _step("inputs", shifted)


def _log_of_shifted_softmax(epsilon: float, logits: Tensor) -> Tensor:
    return (logits.softmax(-1) + epsilon).log()


MUTATIONS = (
    Mutation(
        "logprobs_negated",
        "the sign flipped",
        "A log-probability above 0: ratios are inverted, and the policy unlearns.",
        "Return the log-probability, not the negative log-likelihood (cross_entropy).",
        (_step("finish", torch.neg),),
    ),
    Mutation(
        "gather_axis",
        "gather along the position axis instead of the vocabulary",
        "The values look plausible and belong to other tokens. Training is noise.",
        "log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).",
        (
            _step("pick", _along_positions),
            _step(
                "pick", lambda logprobs, ids: logprobs.gather(-1, ids[:, :1, None].expand(*ids.shape, 1)).squeeze(-1)
            ),
        ),
    ),
    Mutation(
        "off_by_one",
        "the token ids shifted by one against the logits",
        "Each logit row predicts the next token: the logprob of another token is returned.",
        "logits[:, :-1] with ids[:, 1:], once.",
        (_shifted_ids(1), _shifted_ids(-1)),
    ),
    Mutation(
        "not_normalised",
        "the raw logit, not normalised",
        "It is no log-probability: it may be positive, and a constant added to all logits changes it.",
        "Subtract logsumexp over the vocabulary.",
        (_step("normalise", lambda logits: logits),),
    ),
    Mutation(
        "softmax_axis",
        "softmax along another axis than the vocabulary",
        "The values depend on the other tokens of the batch.",
        "log_softmax(logits, dim=-1).",
        (
            _step("normalise", lambda logits: logits.log_softmax(1)),
            _step("normalise", lambda logits: logits.log_softmax(0)),
        ),
    ),
    Mutation(
        "log_missing",
        "probabilities instead of log-probabilities",
        "exp of their difference is no ratio: it stays near 1 whatever the policy does.",
        "Use log_softmax.",
        (_step("normalise", lambda logits: logits.softmax(-1)),),
    ),
    Mutation(
        "epsilon_in_log",
        "log(softmax + epsilon)",
        "Unlikely tokens have a floor and no gradient.",
        "Use log_softmax: it needs no epsilon.",
        tuple(
            _step("normalise", partial(_log_of_shifted_softmax, epsilon))
            for epsilon in (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
        ),
    ),
    Mutation(
        "half_precision",
        "logsumexp in half precision",
        "Errors of 0.01 nats and more, larger for sharp distributions; float16 overflows to NaN.",
        "Cast the logits to float32 before log_softmax or logsumexp.",
        (
            *(_half(dtype) for dtype in (torch.bfloat16, torch.float16)),
            *(_logsumexp_in_half(dtype) for dtype in (torch.bfloat16, torch.float16)),
        ),
    ),
    Mutation(
        "temperature_ignored",
        "the temperature ignored",
        "The logprobs are of another distribution than was sampled: all ratios to the engine are off.",
        "Divide the logits by the sampling temperature.",
        (_scale(lambda logits, temperature: logits),),
    ),
    Mutation(
        "temperature_multiplied",
        "logits multiplied with the temperature instead of divided",
        "A hotter sampler is scored as a colder one.",
        "Divide the logits by the sampling temperature.",
        (_scale(lambda logits, temperature: logits * temperature),),
    ),
    Mutation(
        "temperature_on_logprobs",
        "the logprobs divided by the temperature instead of the logits",
        "They no longer sum to 1: every ratio to the engine is off.",
        "Divide the logits, then normalise.",
        (
            lambda steps: (
                replace(steps, scale=lambda logits, temperature: logits, finish=lambda x: x / steps.temperature)
                if steps.temperature != 1
                else steps
            ),
        ),
    ),
    Mutation(
        "log_base",
        "base 2 or 10 in place of e",
        "All ratios are exp of the wrong number.",
        "Use nats.",
        (_step("finish", lambda x: x / math.log(2)), _step("finish", lambda x: x / math.log(10))),
    ),
    Mutation(
        "logprobs_clamped",
        "logprobs clamped from below",
        "Unlikely tokens have no gradient and a wrong ratio.",
        "Leave them: bound the ratio where it is used.",
        tuple(_step("finish", partial(torch.clamp, min=floor)) for floor in (-1.0, -2.0, -5.0)),
    ),
    Mutation(
        "graph_cut",
        "no gradient",
        "The loss has a value and the policy never changes.",
        "Keep torch.no_grad(), .detach() and numpy away from the policy's logprobs.",
        (_step("finish", torch.Tensor.detach),),
    ),
)
