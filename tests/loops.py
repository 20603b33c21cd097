"""The loop around a policy that only counts, or a real tiny one, for the tests of what surrounds the update."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from leadline.config import Config
from leadline.data import PromptStream
from leadline.engines.base import Engine
from leadline.engines.scripted import ScriptedEngine
from leadline.model_sources import read_tokenizer
from leadline.policy.batch import Batch
from leadline.policy.update_metrics import Update
from leadline.rewards.component import component
from leadline.rewards.scorer import Scorer
from leadline.rollouts import Roller
from leadline.settings.model import Model
from leadline.train import Step, train
from leadline.types import Completion, FinishReason, Prompt, Weights
from tests.builders import settings

TOKENIZER = read_tokenizer(Model(name="tiny"))


def completion(length: int = 2, logprob: float = -1.0, reason: FinishReason = FinishReason.EOS) -> Completion:
    return Completion((7,) * length, (logprob,) * length, (0,) * length, reason)


def lengths(prompt: Prompt, n: int) -> list[Completion]:
    """A script: n completions of 1, 2, ... n tokens."""
    return [completion(i + 1) for i in range(n)]


def count(completion_ids: Sequence[int]) -> float:
    """A reward: one for each token."""
    return float(len(completion_ids))


def token_sum(completion_ids: Sequence[int]) -> float:
    """A reward by which no two random completions are alike."""
    return sum(completion_ids) / 1000


def stream(prompts: int = 64) -> PromptStream:
    return PromptStream([Prompt(0, f"prompt {i}", (5, 6, 7)) for i in range(prompts)], seed=0)


class CountingPolicy:
    """Raises its version with each batch, and remembers the batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.version = 0
        self.discarded_in_a_row = 0
        self.batches: list[Batch] = []
        self.seconds = seconds

    def update(self, batch: Batch) -> Update:
        time.sleep(self.seconds)
        self.version += 1
        self.batches.append(batch)
        return Update({"loss": 0.5}, ["reached"] * batch.num_completions, {}, discarded=False)

    def weights(self) -> Weights:
        return {}


class SlowLoading(ScriptedEngine):
    """New weights take a moment, in which the event loop turns: whoever may start, starts with the old ones."""

    async def load_weights(self, weights: Weights, version: int) -> None:
        await asyncio.sleep(0.002)
        await super().load_weights(weights, version)


def roller(config: Config, engine: Engine, reward: Callable[..., Any] = count) -> Roller:
    return Roller(engine, Scorer([component(reward)]), TOKENIZER, frozenset({3}), config)


def run(config: Config, engine: Engine, *, reward: Callable[..., Any] = count, **parts: Any) -> list[Step]:
    """The steps of the loop, as they were recorded."""
    steps: list[Step] = []

    async def record(step: Step) -> None:
        steps.append(step)

    parts = {"policy": CountingPolicy(), "prompts": stream(), "record": record, **parts}
    asyncio.run(train(config, engine=engine, roller=roller(config, engine, reward), **parts))
    return steps


def config(*, steps: int = 6, **rollout: Any) -> Config:
    return settings(
        rollout={"group_size": 4, "groups_per_step": 3, **rollout}, run={"steps": steps}, eval={"prompts": 0}
    )


def barren(*indices: int) -> Callable[[Prompt, int], list[Completion]]:
    """A script in which all completions of these prompts are alike."""
    return lambda prompt, n: [completion(1)] * n if prompt.index in indices else lengths(prompt, n)
