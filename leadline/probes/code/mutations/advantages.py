"""What goes wrong between rewards and advantages."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code.advantages import (
    AdvantageSteps,
    count,
    divide,
    group_mean,
    group_std,
    mean_of_others,
    no_spread,
    of_group,
)
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.search import Mutation

Change = Callable[[AdvantageSteps], AdvantageSteps]

LARGE_EPSILONS = (1e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e8)


def _step(name: str, new: Any) -> Change:
    return lambda steps: replace(steps, **{name: new})


def _scaled(change: Change) -> Change:
    """Where there is a spread to divide by."""
    return lambda steps: steps if steps.spread is no_spread else change(steps)


def _in_group(change: Change) -> Change:
    return lambda steps: change(steps) if steps.spread is group_std else steps


def _population_std(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    return (of_group((rewards - group_mean(rewards, batch)).square(), batch) / count(batch)).sqrt()


def _variance(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    return group_std(rewards, baseline, batch).square()


def _strided(batch: ProbeBatch) -> ProbeBatch:
    """view(G, -1) in place of view(-1, G)."""
    groups = len(batch.rewards) // batch.group_size
    return replace(batch, group_of_completion=torch.arange(len(batch.rewards)) % max(groups, 1))


def _one_group(batch: ProbeBatch) -> ProbeBatch:
    return replace(batch, group_of_completion=torch.zeros_like(batch.group_of_completion))


def _batch_mean(rewards: Tensor, batch: ProbeBatch) -> Tensor:
    return rewards.mean().expand_as(rewards)


def _tiled(values: Tensor, batch: ProbeBatch) -> Tensor:
    """Statistics of the groups laid out 0, 1, 2, 0, 1, 2 instead of 0, 0, 1, 1, 2, 2."""
    groups = len(values) // batch.group_size
    by_group = values.reshape(groups, batch.group_size)[:, 0]
    return by_group.repeat(batch.group_size)


def _tiled_mean(rewards: Tensor, batch: ProbeBatch) -> Tensor:
    return _tiled(group_mean(rewards, batch), batch)


def _tiled_std(rewards: Tensor, baseline: Tensor, batch: ProbeBatch) -> Tensor:
    return _tiled(group_std(rewards, baseline, batch), batch)


def _tiled_both(steps: AdvantageSteps) -> AdvantageSteps:
    spread = _tiled_std if steps.spread is group_std else steps.spread
    return replace(steps, baseline=_tiled_mean, spread=spread)


def _with_epsilon(epsilon: float) -> Change:
    return _scaled(_step("divide", lambda centred, spread, _: divide(centred, spread, epsilon)))


def _median(rewards: Tensor, batch: ProbeBatch) -> Tensor:
    groups = batch.group_of_completion
    return torch.stack([rewards[groups == group].median() for group in groups])


def _group_max(rewards: Tensor, batch: ProbeBatch) -> Tensor:
    groups = batch.group_of_completion
    return torch.stack([rewards[groups == group].max() for group in groups])


MUTATIONS = (
    Mutation(
        "advantage_sign",
        "the sign flipped (baseline minus reward)",
        "Good completions are pushed down and bad ones up.",
        "reward - baseline.",
        (_step("centre", lambda rewards, baseline: baseline - rewards), _step("finish", torch.neg)),
    ),
    Mutation(
        "epsilon_dominates",
        "an epsilon in the denominator as large as the spread",
        "Advantages vanish although rewards vary: the policy gets no signal.",
        "Epsilon is a rounding guard: 1e-6, 1e-4 at most.",
        tuple(map(_with_epsilon, LARGE_EPSILONS)),
    ),
    Mutation(
        "epsilon_on_the_other_side",
        "the epsilon put where it changes the sign or the mean",
        "Groups with a small spread have exploding or shifted advantages.",
        "centred / (std + epsilon).",
        (
            _scaled(_step("divide", lambda centred, spread, epsilon: centred / (spread - epsilon))),
            _scaled(_step("divide", lambda centred, spread, epsilon: centred / spread + epsilon)),
        ),
    ),
    Mutation(
        "population_std",
        "the population std (ddof 0) in place of the sample std",
        "Advantages are sqrt(n / (n - 1)) times larger: 7 % for groups of 8, 41 % for pairs.",
        "Use std(correction=1), as TRL, verl and OpenRLHF do; or keep it, knowing that the learning rate scales.",
        (_in_group(_step("spread", _population_std)),),
    ),
    Mutation(
        "variance_for_std",
        "the variance in place of the std (or a second division by it)",
        "Advantages depend on the unit of the reward: small spreads explode.",
        "Take the square root.",
        (
            _in_group(_step("spread", _variance)),
            _scaled(_step("divide", lambda centred, spread, epsilon: centred / (spread + epsilon).square())),
        ),
    ),
    Mutation(
        "grouped_across_prompts",
        "completions of different prompts in one group (view(G, -1) for view(-1, G))",
        "The baseline belongs to no prompt: easy prompts are reinforced, hard ones punished.",
        "rewards.view(-1, G), with the completions of a prompt next to each other.",
        (_step("inputs", _strided),),
    ),
    Mutation(
        "one_group",
        "the whole batch as one group",
        "The baseline mixes prompts: easy prompts are reinforced, hard ones punished.",
        "Mean and std of each prompt's own completions.",
        (_step("inputs", _one_group),),
    ),
    Mutation(
        "baseline_of_batch",
        "the batch's mean in place of the group's",
        "The baseline mixes prompts, although the scale is the group's.",
        "Subtract the mean of each prompt's own completions.",
        (_step("baseline", _batch_mean),),
    ),
    Mutation(
        "statistics_tiled",
        "the groups' statistics repeated in the wrong order (repeat for repeat_interleave)",
        "A completion is compared with another prompt's mean.",
        "mean.repeat_interleave(G), or keepdim=True on [prompt, G].",
        (_tiled_both, _step("baseline", _tiled_mean)),
    ),
    Mutation(
        "baseline_missing",
        "no baseline",
        "With rewards of one sign every completion is pushed the same way: variance without information.",
        "Subtract the group's mean.",
        (_step("baseline", lambda rewards, batch: torch.zeros_like(rewards)),),
    ),
    Mutation(
        "baseline_is_another_statistic",
        "the group's median or maximum in place of its mean",
        "Advantages do not sum to 0: with the maximum none is positive.",
        "Subtract the mean.",
        (_step("baseline", _median), _step("baseline", _group_max)),
    ),
    Mutation(
        "own_reward_in_leave_one_out",
        "the other rewards' sum divided by n instead of n - 1",
        "The baseline is too small: advantages do not sum to 0.",
        "(sum - own) / (n - 1).",
        (
            lambda steps: (
                replace(steps, baseline=lambda r, batch: (of_group(r, batch) - r) / count(batch))
                if steps.baseline is mean_of_others
                else steps
            ),
        ),
    ),
    Mutation(
        "multiplied_by_spread",
        "multiplied with the spread instead of divided",
        "Groups that hardly differ hardly count, others count twice.",
        "Divide by the std.",
        (_scaled(_step("divide", lambda centred, spread, epsilon: centred * (spread + epsilon))),),
    ),
    Mutation(
        "advantages_clipped",
        "advantages clipped",
        "The best and the worst completion are taken for average ones.",
        "Leave them; a standardised group of n has none above (n - 1) / sqrt(n).",
        tuple(_step("finish", partial(torch.clamp, min=-bound, max=bound)) for bound in (0.5, 1.0, 2.0)),
    ),
    Mutation(
        "rounded",
        "advantages rounded to integers or to their sign",
        "How much better a completion is, is lost.",
        "Keep floats; look for integer rewards or dtype casts.",
        (_step("finish", torch.round), _step("finish", torch.sign), _step("finish", torch.trunc)),
    ),
)
