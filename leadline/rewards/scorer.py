"""From the completions of a prompt to rollouts with rewards."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from leadline.errors import DataError
from leadline.rewards.component import GIVEN, Component, Failure, Outcome, checked_parameters, component
from leadline.rewards.format_tags import check_decoding
from leadline.rewards.resolve import resolve
from leadline.rewards.reward_model import RewardModel
from leadline.settings.reward import Decoding, Reward
from leadline.types import Completion, FinishReason, Prompt, Rollout

MAX_THREADS = 32
"""Plain reward functions that run at once. More would slow each other down until they time out."""


class Scorer:
    """Scores completions with every component; a rollout's reward is their weighted sum.

    A component that has no reward (None) leaves the sum; if all those with a weight do, the rollout has no reward
    (NaN). If one raises, times out, or returns NaN or an infinity, the rollout is failed: no reward, `error` set.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = tuple(components)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Rollout]:
        """One rollout per completion, in their order; `texts` are what the rewards see.

        Raises RewardError: a component returned something other than one number or None per completion.
        """
        pairs = list(zip(completions, texts, strict=True))
        scored = [(c, text) for c, text in pairs if c.finish_reason is not FinishReason.ABORT]
        outcomes = iter(await self._outcomes(prompt, [c for c, _ in scored], [text for _, text in scored]))
        return [
            Rollout(c, text, error="aborted by the engine")
            if c.finish_reason is FinishReason.ABORT
            else self._rollout(c, text, next(outcomes))
            for c, text in pairs
        ]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if a component needs a column that is not among `columns`."""
        problems = [
            f"The reward {part.label!r} needs {', '.join(missing)}, but the dataset's columns are "
            f"{', '.join(sorted(columns)) or '(none)'}. It could not be called. Add the column, set it in the reward's "
            f"params, or name the parameter after a column or one of {', '.join(sorted(GIVEN))}."
            for part in self.components
            if (missing := sorted(part.requires - set(columns)))
        ]
        if problems:
            raise DataError("\n".join(problems))

    async def _outcomes(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[list[Outcome]]:
        """By completion, then by component."""
        if not completions:
            return []
        threads = self._free_threads()
        returned = await asyncio.gather(*(c.returned(prompt, completions, texts, threads) for c in self.components))
        by_component = [
            part.outcomes(results, len(completions)) for part, results in zip(self.components, returned, strict=True)
        ]
        return [list(outcomes) for outcomes in zip(*by_component, strict=True)]

    def _rollout(self, completion: Completion, text: str, outcomes: Sequence[Outcome]) -> Rollout:
        rewards: dict[str, float | None] = {}
        errors: list[str] = []
        terms: list[float] = []
        for part, outcome in zip(self.components, outcomes, strict=True):
            if isinstance(outcome, Failure):
                errors.append(outcome.error)
            elif outcome is not None and not math.isfinite(outcome):
                errors.append(f"{part.label}: returned {outcome}")
            else:
                rewards[part.label] = outcome
                if outcome is not None and part.weight:  # a component that is only logged cannot make a reward
                    terms.append(part.weight * outcome)
        if errors:
            return Rollout(completion, text, rewards, error="; ".join(errors))
        return Rollout(completion, text, rewards, reward=math.fsum(terms) if terms else math.nan)

    def _free_threads(self) -> asyncio.Semaphore:
        """A semaphore belongs to one event loop; a caller may use several in turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._threads = loop, asyncio.Semaphore(MAX_THREADS)
        return self._threads


def build_scorer(rewards: Sequence[Reward], decoding: Decoding | None = None) -> Scorer:
    """The scorer of a recipe's `[[rewards]]`. With `decoding`, also checked: no reward looks for what it strips.

    Raises RewardError: an unknown or unloadable reward. Raises ConfigError: parameters that it does not take.
    """
    for reward in rewards:
        if reward.name == "format_tags" and decoding is not None:
            check_decoding(reward.params, decoding)
    return Scorer([_component(reward) for reward in rewards])


def _component(reward: Reward) -> Component:
    label = reward.resolved_label
    function, params = _function(reward, label)
    return component(
        function, label=label, weight=reward.weight, params=params, batched=reward.batched, timeout_s=reward.timeout_s
    )


def _function(reward: Reward, label: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The function, and the parameters still to be bound to it: a reward model takes them when it is loaded."""
    if not reward.name.startswith("model:"):
        return resolve(reward.name), reward.params
    checked_parameters(RewardModel, label, reward.params)
    return RewardModel(reward.name.removeprefix("model:"), **reward.params), {}
