"""Mean reward and pass@k on held-out prompts, through the same engine and rewards as training."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from leadline.config import Config
from leadline.rollouts import Roller, rollout_metrics
from leadline.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: the mean reward of each held-out prompt, in order, and canonical metrics."""

    rewards: tuple[float, ...]
    """NaN for a prompt without any reward."""
    passes: tuple[float, ...]
    """The share of its completions with at least `eval.pass_threshold`."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference of means over prompts with its 95 % bootstrap interval."""

    before: float
    after: float
    """Means over the prompts that have a reward in both evaluations."""
    mean: float
    low: float
    high: float
    prompts: int

    @property
    def improved(self) -> bool:
        return self.low > 0


class Improvement(NamedTuple):
    """From one evaluation to another, by prompt."""

    reward: Difference
    passes: Difference


def improvement(before: Evaluation, after: Evaluation, seed: int) -> Improvement:
    """The paired differences of mean reward and of the share of completions that pass."""
    return Improvement(
        paired_difference(before.rewards, after.rewards, seed), paired_difference(before.passes, after.passes, seed)
    )


async def evaluate(roller: Roller, prompts: Sequence[Prompt], config: Config) -> Evaluation:
    """Sample every held-out prompt `eval.samples` times. The draws are seeded by prompt: two evaluations are paired."""
    settings = config.eval
    sampling = config.sampling
    if settings.temperature is not None:
        sampling = sampling.model_copy(update={"temperature": settings.temperature})
    groups = await asyncio.gather(*(roller.group(prompt, settings.samples, sampling) for prompt in prompts))
    rewards = tuple(_mean([r.reward for r in group.rollouts]) for group in groups)
    rows = rollout_metrics(groups)
    metrics = {
        "eval/reward_mean": _mean(rewards),
        "eval/length_mean": rows["rollout/length_mean"],
        "eval/truncated_fraction": rows["rollout/truncated_fraction"],
        "eval/scored": float(sum(math.isfinite(r.reward) for g in groups for r in g.rollouts)),
    }
    for name, value in rows.items():
        if name.startswith("reward/") and name.count("/") == 2 and name.endswith("/mean"):
            metrics[f"eval/{name}"] = value
    k = 1
    while k <= settings.samples:
        metrics[f"eval/pass_at_{k}"] = _mean([pass_at_k(group, k, settings.pass_threshold) for group in groups])
        k *= 2
    return Evaluation(rewards, tuple(pass_at_k(group, 1, settings.pass_threshold) for group in groups), metrics)


def pass_at_k(group: Group, k: int, threshold: float) -> float:
    """Chance that one of k draws without replacement passes: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    rewards = [r.reward for r in group.rollouts if math.isfinite(r.reward)]
    if len(rewards) < k:
        return math.nan
    failed = sum(reward < threshold for reward in rewards)
    return 1 - math.comb(failed, k) / math.comb(len(rewards), k)


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Difference:
    """Mean over prompts of after - before, with the 95 % percentile bootstrap interval (10,000 resamples of prompts)."""
    pairs = np.array(list(zip(before, after, strict=True)), dtype=float).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return Difference(math.nan, math.nan, math.nan, math.nan, math.nan, prompts=0)
    change = pairs[:, 1] - pairs[:, 0]
    draws = np.random.default_rng(seed).integers(0, len(change), (10_000, len(change)))
    low, high = np.quantile(change[draws].mean(axis=1), [0.025, 0.975])
    first, last = pairs.mean(axis=0)
    return Difference(float(first), float(last), float(change.mean()), float(low), float(high), prompts=len(change))


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else math.nan
