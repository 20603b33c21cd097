"""The loop.

    prompts -> engine.generate -> decode -> reward -> group advantages -> pack -> old and reference logprobs
            -> importance weights -> policy loss -> guard -> optimizer -> engine.load_weights -> record

Synchronous training is this loop with `rollout.max_staleness = 0`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from leadline.batch import Batch, build_batch
from leadline.config import Config, RolloutSettings
from leadline.engines.base import Engine
from leadline.errors import LeadlineError, NoSignalError, TrainingError
from leadline.rollout_queue import PromptSource, RolloutQueue, check_staleness
from leadline.rollouts import Roller, check_failures, has_signal, rollout_metrics
from leadline.types import Group, Weights
from leadline.update_metrics import Update


class Trainee(Protocol):
    """What the loop needs of a policy."""

    version: int
    discarded_in_a_row: int

    def update(self, batch: Batch) -> Update: ...

    def weights(self) -> Weights: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as it is recorded."""

    number: int
    """From 1; the policy's version after it."""
    groups: Sequence[Group]
    batch: Batch
    update: Update
    metrics: dict[str, float]
    position: int
    """Where the prompt stream goes on if the run is resumed after this step."""


async def train(
    config: Config,
    *,
    policy: Trainee,
    engine: Engine,
    roller: Roller,
    prompts: PromptSource,
    record: Callable[[Step], Awaitable[None]],
    stage: Callable[[str], None] = lambda name: None,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Train from `policy.version` to `run.steps`; `record` sees each step, `stopping` is asked before each.

    Raises RewardError, NoSignalError, TrainingError, EngineError, StalenessError.
    """
    settings = config.rollout
    queue = RolloutQueue(
        roller.train_group,
        prompts,
        groups_per_step=settings.groups_per_step,
        max_staleness=settings.max_staleness,
    )
    barren_steps = 0
    async with _failing_plainly() as tasks:
        filling = tasks.create_task(queue.fill(tasks))
        while policy.version < config.run.steps and not stopping():
            started = time.perf_counter()
            stage("generate")
            groups = await queue.take(settings.groups_per_step)
            groups, replaced = await _refill(queue, groups, settings)
            generated = time.perf_counter()
            check_staleness(groups, policy.version, settings.max_staleness)
            check_failures(groups, settings.max_failed_fraction)
            barren_steps = _check_signal(groups, barren_steps, settings)

            stage("update")
            batch = build_batch(groups, config, policy.version, replaced=replaced)
            _check_unscored(batch, config)
            update = await asyncio.to_thread(policy.update, batch)
            updated = time.perf_counter()
            stage("load weights")
            await engine.load_weights(policy.weights(), policy.version)
            queue.release(settings.groups_per_step)  # only now may as many new groups start

            timings = {
                "time/generate_s": generated - started,
                "time/load_weights_s": time.perf_counter() - updated,
                "time/step_s": time.perf_counter() - started,
                "throughput/sampled_tokens_per_s": len(batch.token_ids) / max(1e-9, generated - started),
                "time/reward_s": max(group.timings.get("reward", 0.0) for group in groups),
            }
            counts = {
                "step": float(policy.version),
                "rollout/refilled_groups": float(len(groups) - settings.groups_per_step),
            }
            metrics = counts | rollout_metrics(groups) | update.metrics | timings
            await record(Step(policy.version, groups, batch, update, metrics, queue.position))
            _check_discarded(policy, config)
        filling.cancel()
        queue.cancel()


async def _refill(
    queue: RolloutQueue, groups: list[Group], settings: RolloutSettings
) -> tuple[list[Group], frozenset[int]]:
    """Draw further groups for those without signal, at most `refill`. Returns all groups, and which are replaced."""
    wanted, left = settings.groups_per_step, settings.refill
    while left > 0 and (missing := wanted - sum(map(has_signal, groups))) > 0:
        extra = await queue.refill(min(missing, left))
        left -= len(extra)
        groups = groups + extra
    barren = [i for i, group in enumerate(groups) if not has_signal(group)]
    return groups, frozenset(barren[: len(groups) - wanted])


def _check_signal(groups: Sequence[Group], barren_steps: int, settings: RolloutSettings) -> int:
    """Steps in a row without any signal, this one included. Raises NoSignalError past the limit."""
    if any(map(has_signal, groups)):
        return 0
    if barren_steps + 1 < settings.max_steps_without_signal:
        return barren_steps + 1
    rewards = sorted({rollout.reward for group in groups for rollout in group.rollouts})
    raise NoSignalError(
        f"rollout.max_steps_without_signal is {settings.max_steps_without_signal}, but as many steps in a row had no "
        f"group with two different rewards (the last: {rewards[:3]}). Nothing can be learned. Choose prompts that are "
        "solved sometimes, a reward with more than two values, or a larger rollout.group_size."
    )


def _check_unscored(batch: Batch, config: Config) -> None:
    unscored = batch.rollout_logprobs.isnan()
    limit = 0.0 if config.objective.on_unscored == "refuse" else config.objective.max_unscored_fraction
    if not len(unscored) or float(unscored.float().mean()) <= limit:
        return
    owners = batch.group_of_completion[batch.completion_of_token[unscored]].unique().tolist()
    raise TrainingError(
        f"objective.max_unscored_fraction is {limit} (on_unscored is {config.objective.on_unscored!r}), but "
        f"{int(unscored.sum())} of {len(unscored)} tokens came without a logprob, in groups {owners[:8]} of this step. "
        "Their importance weights would be guesses. Find out why the engine cannot score them, or raise the limit."
    )


def _check_discarded(policy: Trainee, config: Config) -> None:
    if policy.discarded_in_a_row >= config.optimizer.max_discarded_steps:
        raise TrainingError(
            f"optimizer.max_discarded_steps is {config.optimizer.max_discarded_steps}, but as many optimizer steps in a "
            "row had a loss or gradient that is not finite. The weights are untouched, and nothing is learned. "
            "Look into blackbox/ for the rollouts, and lower the learning rate if logits overflow."
        )


class _failing_plainly(asyncio.TaskGroup):
    """A TaskGroup that raises the first error of ours as itself: users do not read exception groups."""

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await super().__aexit__(*exc_info)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            ours = group.subgroup(LeadlineError)
            if ours is None:
                raise
            raise _first(ours) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
