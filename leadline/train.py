"""The loop.

    prompts -> engine.generate -> decode -> reward -> group advantages -> pack -> old and reference logprobs
            -> importance weights -> policy loss -> guard -> optimizer -> engine.load_weights -> record

Synchronous training is this loop with `rollout.max_staleness = 0`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from leadline.batch import Batch, build_batch
from leadline.config import Config
from leadline.engines.base import Engine
from leadline.errors import LeadlineError, NoSignalError, TrainingError
from leadline.rollout_queue import PromptSource, RolloutQueue, check_staleness
from leadline.rollouts import Roller, check_failures, has_signal, rollout_metrics
from leadline.settings.rollout import RolloutSettings
from leadline.types import Group, Weights
from leadline.update_metrics import Update

T = TypeVar("T")


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
    record: Callable[[Step], Coroutine[Any, Any, None]],
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
            _check_unscored(groups, batch, config)
            update = await _whole(asyncio.to_thread(policy.update, batch))
            updated = time.perf_counter()
            stage("load weights")
            await engine.load_weights(policy.weights(), policy.version)

            counts = {
                "step": float(policy.version),
                "rollout/refilled_groups": float(len(groups) - settings.groups_per_step),
            }
            timings = _timings(started, generated, updated, time.perf_counter(), groups, batch)
            metrics = counts | rollout_metrics(groups) | update.metrics | timings
            await _whole(record(Step(policy.version, groups, batch, update, metrics, queue.position)))
            _check_discarded(policy, config)
            # Only now, with the new weights live in the engine, may as many new groups start; and only after the
            # record, so that an evaluation is not batched with them: a resumed run has it to the last digit.
            queue.release(settings.groups_per_step)
        filling.cancel()
        queue.cancel()


def _timings(
    started: float, generated: float, updated: float, loaded: float, groups: Sequence[Group], batch: Batch
) -> dict[str, float]:
    """From the moments at which a step started, had its groups, was updated, and was loaded into the engine."""
    return {
        "time/generate_s": generated - started,
        "time/reward_s": max(group.timings.get("reward", 0.0) for group in groups),
        "time/load_weights_s": loaded - updated,
        "time/step_s": loaded - started,
        "throughput/sampled_tokens_per_s": len(batch.token_ids) / (loaded - started),
    }


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


def _check_unscored(groups: Sequence[Group], batch: Batch, config: Config) -> None:
    unscored = batch.rollout_logprobs.isnan()
    refuse = config.objective.on_unscored == "refuse"
    limit = 0.0 if refuse else config.objective.max_unscored_fraction
    if not len(unscored) or float(unscored.float().mean()) <= limit:
        return
    owners = batch.group_of_completion[batch.completion_of_token[unscored]].unique().tolist()
    setting = "objective.on_unscored is 'refuse'" if refuse else f"objective.max_unscored_fraction is {limit}"
    raise TrainingError(
        f"{setting}, but {int(unscored.sum())} of {len(unscored)} tokens came without a logprob, in rollouts of the "
        f"prompts {', '.join(str(groups[owner].prompt.index) for owner in owners[:8])} (by index). Their importance "
        "weights would be guesses. Find out why the engine cannot score them, or allow them."
    )


def _check_discarded(policy: Trainee, config: Config) -> None:
    if policy.discarded_in_a_row >= config.optimizer.max_discarded_steps:
        raise TrainingError(
            f"optimizer.max_discarded_steps is {config.optimizer.max_discarded_steps}, but as many optimizer steps in a "
            "row had a loss or gradient that is not finite. The weights are untouched, and nothing is learned. "
            "Look into blackbox/ for the rollouts, and lower the learning rate if logits overflow."
        )


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. An error elsewhere stops the run after it, never half-way through an update or a file."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class _failing_plainly(asyncio.TaskGroup):
    """A TaskGroup that raises the first error as itself, one of ours if there is one: users read no exception groups."""

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            return await super().__aexit__(*exc_info)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            error = _first(group.subgroup(LeadlineError) or group)
        raise error  # not in the handler: the group would be shown as its context


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
