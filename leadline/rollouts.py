"""From a prompt to a group: generate, decode, reward. And what a step's groups look like, as canonical metrics."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from leadline.config import Config
from leadline.config_problems import OVERLONG
from leadline.decoding import decode
from leadline.engines.base import Engine
from leadline.errors import RewardError
from leadline.loop.activity import Activity
from leadline.rewards.overlong import soft_overlong
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout


class Scorer(Protocol):
    """Scores the completions of one prompt with every reward of the recipe."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Rollout]: ...


@dataclass(frozen=True, slots=True)
class Roller:
    """Everything between a prompt and its group."""

    engine: Engine
    scorer: Scorer
    tokenizer: Any
    eos_ids: Collection[int]
    config: Config
    activity: Activity = field(default_factory=Activity)
    """Is told what each group waits for."""

    async def train_group(self, prompt: Prompt) -> Group:
        """The group that a step trains on."""
        group = await self.group(prompt, self.config.rollout.group_size, self.config.sampling)
        if not self.config.objective.overlong_buffer:
            return group
        return replace(group, rollouts=[self._penalised(rollout) for rollout in group.rollouts])

    async def group(self, prompt: Prompt, size: int, sampling: Sampling) -> Group:
        """`size` rollouts of the prompt."""
        with self.activity.group(prompt.index) as waits_for:
            waits_for("the engine")
            started = time.perf_counter()
            completions = await self.engine.generate(prompt, size, sampling)
            generated = time.perf_counter()
            texts = [self._text(prompt, completion, sampling) for completion in completions]
            waits_for("rewards")
            rollouts = await self.scorer.score(prompt, completions, texts)
            timings = {"generate": generated - started, "reward": time.perf_counter() - generated}
        return Group(prompt, rollouts, timings)

    def _text(self, prompt: Prompt, completion: Completion, sampling: Sampling) -> str:
        return decode(
            self.tokenizer,
            completion,
            prompt_text=prompt.text,
            settings=self.config.decoding,
            sampling=sampling,
            eos_ids=self.eos_ids,
        )

    def _penalised(self, rollout: Rollout) -> Rollout:
        objective = self.config.objective
        penalty = soft_overlong(
            len(rollout.completion.token_ids),
            self.config.sampling.max_tokens,
            objective.overlong_buffer,
            objective.overlong_penalty,
        )
        rewards = {**rollout.rewards, OVERLONG: penalty}
        return replace(rollout, rewards=rewards, reward=rollout.reward + penalty)


def has_signal(group: Group) -> bool:
    """Whether two rollouts of the group have different rewards, in the precision in which advantages are made."""
    rewards = np.array([r.reward for r in group.rollouts if math.isfinite(r.reward)], dtype=np.float32)
    return len(rewards) > 1 and bool(rewards.max() > rewards.min())


def check_failures(groups: Sequence[Group], limit: float) -> None:
    """Raise RewardError when more than `limit` of the rollouts failed, quoting the first failure."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    if rollouts and len(errors) / len(rollouts) > limit:
        raise RewardError(
            f"rollout.max_failed_fraction is {limit}, but {len(errors)} of {len(rollouts)} rollouts of this step failed; "
            f"the first: {errors[0]}. What is left would train on a biased sample. Mend the reward, or raise the limit."
        )


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths, finish reasons and failures of the groups. A mean over nothing is NaN."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return _reward_metrics(groups, rollouts) | _completion_metrics(groups, [r.completion for r in rollouts])


def _reward_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [r.reward for r in rollouts if math.isfinite(r.reward)]
    within = [_std([r.reward for r in group.rollouts if math.isfinite(r.reward)]) for group in groups]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/group_std": _mean([std for std in within if not math.isnan(std)]),
        "reward/max": max(rewards, default=math.nan),
        "reward/min": min(rewards, default=math.nan),
        "rollout/failed_fraction": _mean([r.error is not None for r in rollouts]),
        "rollout/unrewarded_fraction": _mean([r.error is None and math.isnan(r.reward) for r in rollouts]),
        "rollout/zero_signal_fraction": _mean([not has_signal(group) for group in groups]),
    }
    for label in dict.fromkeys(label for r in rollouts for label in r.rewards):
        values = [r.rewards[label] for r in rollouts if label in r.rewards]
        metrics[f"reward/{label}/mean"] = _mean([v for v in values if v is not None])
        metrics[f"reward/{label}/none_fraction"] = _mean([v is None for v in values])
    return metrics


def _completion_metrics(groups: Sequence[Group], completions: Sequence[Completion]) -> dict[str, float]:
    lengths = [len(c.token_ids) for c in completions]
    logprobs = [value for c in completions for value in c.logprobs if math.isfinite(value)]
    metrics = {
        "rollout/tokens": float(sum(lengths)),
        "rollout/prompt_tokens": float(sum(len(group.prompt.token_ids) for group in groups)),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_min": float(min(lengths, default=0)),
        "rollout/length_max": float(max(lengths, default=0)),
        "rollout/truncated_fraction": _mean([c.truncated for c in completions]),
        "rollout/entropy": -_mean(logprobs),
    }
    for reason in FinishReason:
        metrics[f"rollout/finish_{reason}_fraction"] = _mean([c.finish_reason is reason for c in completions])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _std(values: Sequence[float]) -> float:
    return float(np.std(values)) if len(values) else math.nan
