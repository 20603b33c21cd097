"""Batches at the edge of what happens, and what a function must still do there."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.findings import Finding, Level
from leadline.probes.code.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Edge:
    """One case: how a batch becomes it, and what is wrong with an outcome there."""

    name: str
    words: str
    change: Callable[[ProbeBatch], ProbeBatch]
    problem: Callable[[Outcome, ProbeBatch], str | None]
    consequence: str
    fix: str
    level: Level = "error"

    def finding(self, outcome: Outcome, batch: ProbeBatch) -> Finding | None:
        """What is wrong there, if anything; `batch` is the changed one."""
        problem = outcome.error if outcome.error is not None else self.problem(outcome, batch)
        if problem is None:
            return None
        return Finding(self.level, self.name, f"{self.words}: {problem}", self.consequence, self.fix)


def not_finite(outcome: Outcome, batch: ProbeBatch) -> str | None:
    """A NaN or an infinity in values or gradient."""
    for name, tensor in (("value", outcome.values), ("gradient", outcome.gradient)):
        if tensor is not None and not bool(tensor.isfinite().all()):
            return f"the {name} holds {'NaN' if bool(tensor.isnan().any()) else 'an infinity'}"
    return None


def only_gradient_not_finite(outcome: Outcome, batch: ProbeBatch) -> str | None:
    """The value is finite and its gradient is not: a branch that `where` did not choose was differentiated."""
    if outcome.values is None or outcome.gradient is None or not bool(outcome.values.isfinite().all()):
        return None
    return not_finite(outcome, batch)


def only_value_not_finite(outcome: Outcome, batch: ProbeBatch) -> str | None:
    """The other half of `only_gradient_not_finite`."""
    return None if only_gradient_not_finite(outcome, batch) else not_finite(outcome, batch)


def not_zero(limit: float) -> Callable[[Outcome, ProbeBatch], str | None]:
    """A value that is not 0 within `limit`."""

    def problem(outcome: Outcome, batch: ProbeBatch) -> str | None:
        assert outcome.values is not None
        largest = float(outcome.values.abs().max())
        return None if largest <= limit else f"the largest value is {largest:.3g}"

    return problem


def _masked_row(batch: ProbeBatch) -> ProbeBatch:
    mask = batch.loss_mask.clone()
    mask[0] = False
    return replace(batch, loss_mask=mask)


def _all_masked(batch: ProbeBatch) -> ProbeBatch:
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def _first_token_only(batch: ProbeBatch) -> ProbeBatch:
    return replace(batch, loss_mask=batch.loss_mask & (torch.arange(batch.shape[1]) == 0))


def in_padding(**values: float) -> Callable[[ProbeBatch], ProbeBatch]:
    """These tensors with this value outside the mask."""
    return lambda b: b.having(**{n: torch.where(b.loss_mask, getattr(b, n), value) for n, value in values.items()})


def on_a_token(**values: float) -> Callable[[ProbeBatch], ProbeBatch]:
    """These tensors with this value at the second token of the second completion."""

    def change(batch: ProbeBatch) -> ProbeBatch:
        changed: dict[str, Any] = {name: getattr(batch, name).clone() for name in values}
        for name, tensor in changed.items():
            tensor[1, 1] = values[name]
        return replace(batch, **changed)

    return change


def _with_negative_advantages(batch: ProbeBatch) -> ProbeBatch:
    return replace(batch, advantages=-batch.advantages.abs())


MASKED_ROW = Edge(
    "masked_row",
    "A completion without any trained token",
    _masked_row,
    not_finite,
    "A masked (truncated) completion divides 0 by 0: the step is NaN, and so are the weights after it.",
    "Divide by mask.sum(-1).clamp(min=1).",
)

LOSS = (
    MASKED_ROW,
    Edge(
        "all_masked",
        "A batch without any trained token",
        _all_masked,
        not_finite,
        "When all completions of a micro-batch are masked, the step is NaN, and so are the weights after it.",
        "Divide by mask.sum().clamp(min=1).",
    ),
    Edge(
        "one_token",
        "Completions of one token",
        _first_token_only,
        not_finite,
        "A completion that ends at once breaks the step.",
        "Look for a squeeze() without an axis, a std over tokens, or a slice that drops the only token.",
    ),
    Edge(
        "exp_before_where",
        "Padding whose log ratio overflows",
        in_padding(logprobs=0.0, old_logprobs=-1000.0),
        only_gradient_not_finite,
        "exp comes before where: the unchosen branch is infinite, and infinity times 0 is a NaN gradient.",
        "Mask the log ratio before exp: exp(where(mask, log_ratio, 0)).",
    ),
    Edge(
        "padding_overflows",
        "Padding whose log ratio overflows",
        in_padding(logprobs=0.0, old_logprobs=-1000.0),
        only_value_not_finite,
        "Infinity times 0 is NaN: it must not happen that padding differs by more than 88 nats.",
        "Mask with where, not by multiplication, and before exp.",
        "note",
    ),
    Edge(
        "padding_is_nan",
        "NaN in the padding",
        in_padding(logprobs=math.nan, old_logprobs=math.nan, ref_logprobs=math.nan, rollout_weights=math.nan),
        not_finite,
        "NaN times 0 is NaN: the caller must fill padding with numbers.",
        "Mask with where(mask, loss, 0) on the inputs, not by multiplication of the result.",
        "note",
    ),
    Edge(
        "ratio_overflows",
        "A trained token whose log ratio is 800 and whose advantage is negative",
        lambda b: on_a_token(logprobs=-1.0, old_logprobs=-801.0)(_with_negative_advantages(b)),
        not_finite,
        "One token that the policy now likes far more makes the loss infinite: only a guard outside saves the weights.",
        "Clamp the log ratio (verl: to 20) before exp.",
        "note",
    ),
    Edge(
        "old_logprob_is_nan",
        "A trained token without an old logprob (NaN)",
        on_a_token(old_logprobs=math.nan),
        not_finite,
        "One unscored token makes the whole step NaN: the caller must replace it.",
        "Treat it as on policy: where(isnan(old), logprobs.detach(), old).",
        "note",
    ),
)

KL = (
    MASKED_ROW,
    Edge(
        "equal_policies",
        "A policy equal to its reference",
        lambda b: replace(b, ref_logprobs=b.logprobs.detach().clone()),
        not_zero(1e-9),
        "The KL of a policy from itself is 0.",
        "Check signs and constants.",
    ),
    Edge(
        "kl_overflows",
        "A token that the reference finds e^800 times likelier",
        on_a_token(logprobs=-801.0, ref_logprobs=-1.0),
        not_finite,
        "One token makes the KL infinite, and with it the step.",
        "Clamp ref_logprobs - logprobs from above before exp.",
        "note",
    ),
    Edge(
        "impossible_in_both",
        "A token that is impossible (-inf) for both",
        on_a_token(logprobs=-math.inf, ref_logprobs=-math.inf),
        not_finite,
        "-inf minus -inf is NaN: with top-k or top-p logprobs the caller must exclude such tokens.",
        "where(logprobs == ref_logprobs, 0, difference).",
        "note",
    ),
)

IMPORTANCE = (
    Edge(
        "unscored_token",
        "A token that the engine did not score (NaN)",
        on_a_token(rollout_logprobs=math.nan),
        not_finite,
        "One unscored token makes the loss NaN, and the weights after it.",
        "Give it weight 1: nan_to_num of the log ratio, before summing and before exp.",
    ),
    Edge(
        "weight_overflows",
        "A token that the engine found e^800 times less likely",
        on_a_token(old_logprobs=-1.0, rollout_logprobs=-801.0),
        not_finite,
        "An infinite weight, or one that is NaN after the mask.",
        "Clamp the log ratio before exp; compare with the bound in logs.",
    ),
    Edge(
        "impossible_in_both",
        "A token that is impossible (-inf) for both",
        on_a_token(old_logprobs=-math.inf, rollout_logprobs=-math.inf),
        not_finite,
        "-inf minus -inf is NaN.",
        "where(old == rollout, 0, difference).",
        "note",
    ),
    Edge(
        "padding_is_nan",
        "NaN in the padding",
        in_padding(old_logprobs=math.nan, rollout_logprobs=math.nan),
        not_finite,
        "NaN times 0 is NaN: the caller must fill padding with numbers.",
        "Mask with where, not by multiplication.",
        "note",
    ),
    Edge(
        "masked_row",
        "A completion without any trained token",
        _masked_row,
        not_finite,
        "A masked completion divides 0 by 0.",
        "Divide by mask.sum(-1).clamp(min=1).",
    ),
)


def _impossible_entry(batch: ProbeBatch) -> ProbeBatch:
    """One entry of the vocabulary is impossible everywhere; no token is it."""
    last = batch.logits.shape[-1] - 1
    logits = torch.cat([batch.logits[..., :last], torch.full_like(batch.logits[..., :1], -math.inf)], -1)
    return replace(batch, logits=logits, token_ids=batch.token_ids.clamp(max=last - 1))


LOGPROBS = (
    Edge(
        "impossible_entry",
        "A vocabulary entry at -inf (top-k, a ban, padding of the vocabulary)",
        _impossible_entry,
        not_finite,
        "NaN in the logprobs or in their gradient.",
        "log_softmax, or logit minus logsumexp, bear -inf; products of p and log p do not.",
    ),
    Edge(
        "large_logits",
        "Logits around 10000",
        lambda b: replace(b, logits=b.logits + 1e4),
        not_finite,
        "exp overflows without subtracting the largest logit.",
        "log_softmax subtracts it.",
    ),
)


def _one_nan(batch: ProbeBatch) -> ProbeBatch:
    rewards = batch.rewards.clone()
    rewards[0] = math.nan
    return replace(batch, rewards=rewards)


def _all_equal(value: float) -> Callable[[ProbeBatch], ProbeBatch]:
    return lambda batch: replace(batch, rewards=torch.full_like(batch.rewards, value))


def _nearly_equal(batch: ProbeBatch) -> ProbeBatch:
    """Equal but for the rounding of float32: 0.1 + 0.2 against 0.3."""
    rewards = torch.full_like(batch.rewards, 0.3)
    rewards[::2] = float(torch.tensor(0.1) + torch.tensor(0.2))
    return replace(batch, rewards=rewards).to(torch.float32)


def _singletons(batch: ProbeBatch) -> ProbeBatch:
    return replace(batch, group_size=1, group_of_completion=torch.arange(len(batch.rewards)))


def _leaks(outcome: Outcome, batch: ProbeBatch) -> str | None:
    """Not finite in a group whose rewards are."""
    assert outcome.values is not None
    others = batch.group_of_completion != batch.group_of_completion[0]
    reached = not bool(outcome.values[others].isfinite().all())
    return "completions of other prompts have NaN advantages" if reached else None


ADVANTAGES = (
    Edge(
        "equal_rewards",
        "A batch with equal rewards",
        _all_equal(0.7),
        not_zero(1e-6),
        "Groups without information get an advantage (or NaN).",
        "(r - mean) / (std + epsilon), with an epsilon above 0.",
    ),
    Edge(
        "nan_reward_leaks",
        "One reward that is NaN",
        _one_nan,
        _leaks,
        "One failed reward takes the whole batch with it.",
        "Use means and stds of the finite rewards; give the failed one advantage 0.",
    ),
    Edge(
        "nan_reward",
        "One reward that is NaN",
        _one_nan,
        not_finite,
        "Its whole group is NaN, and so is the loss: the caller must drop it.",
        "Use means and stds of the finite rewards; give the failed one advantage 0.",
        "note",
    ),
    Edge(
        "rounding_blown_up",
        "Rewards that are equal but for rounding (0.1 + 0.2 and 0.3, float32)",
        _nearly_equal,
        not_zero(1e-2),
        "Rounding noise is scaled up to a full advantage.",
        "Take rewards that differ by less than 1e-6 for equal, or use an epsilon of 1e-4.",
        "note",
    ),
    Edge(
        "group_of_one",
        "Groups of one completion",
        _singletons,
        lambda outcome, batch: not_finite(outcome, batch) or not_zero(1e-6)(outcome, batch),
        "There is nothing to compare: the std is NaN, or the raw reward becomes the advantage.",
        "Use groups of at least two, or give such groups advantage 0.",
        "note",
    ),
)

EDGES = {"loss": LOSS, "kl": KL, "importance": IMPORTANCE, "logprobs": LOGPROBS, "advantages": ADVANTAGES}
