"""The loop.

    prompts -> engine.generate -> decode -> reward -> group advantages -> pack -> old and reference logprobs
            -> importance weights -> policy loss -> guard -> optimizer -> engine.load_weights -> record

Synchronous training is this loop with `rollout.max_staleness = 0`.
"""

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from leadline.compute import computed
from leadline.config import Config
from leadline.engines.base import Engine
from leadline.errors import NoSignalError, TrainingError
from leadline.loop.activity import Activity
from leadline.loop.concurrency import PlainTaskGroup, whole
from leadline.loop.place import Place
from leadline.loop.replay_buffer import ReplayBuffer, fresh
from leadline.loop.rollout_queue import PromptSource, RolloutQueue, check_staleness
from leadline.loop.waiting import StepWatch
from leadline.policy.batch import Batch, build_batch
from leadline.policy.update_metrics import Update
from leadline.rollouts import Roller, check_failures, has_signal, rollout_metrics
from leadline.settings.rollout import RolloutSettings
from leadline.types import Group, Weights


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
    place: Place
    """Where the stream of groups goes on if the run is resumed after this step."""


async def _nothing() -> None:
    pass


async def _no_metrics(groups: Sequence[Group], metrics: dict[str, float]) -> dict[str, float]:
    return {}


async def train(
    config: Config,
    *,
    policy: Trainee,
    engine: Engine,
    roller: Roller,
    prompts: PromptSource,
    record: Callable[[Step], Coroutine[Any, Any, None]],
    measure: Callable[[Sequence[Group], dict[str, float]], Coroutine[Any, Any, dict[str, float]]] = _no_metrics,
    evaluate: Callable[[], Coroutine[Any, Any, None]] = _nothing,
    place: Place = Place(),  # noqa: B008 - it is frozen
    stage: Callable[[str], None] = lambda name: None,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Train from `policy.version` to `run.steps`; `record` sees each step, then comes `evaluate`.

    `measure` has metrics to add to an update's, once the engine holds the weights. `place` is where a resumed run goes on,
    with `prompts` at its position; `stopping` is asked before each step. A step whose weights the engine could not load is
    recorded: it is trained.
    Raises RewardError, NoSignalError, TrainingError, EngineError, StalenessError.
    """
    settings, activity = config.rollout, roller.activity
    queue = _queue(roller, prompts, settings, place.ahead)
    replay = ReplayBuffer(settings.replay_max_staleness, place.replay)
    barren_steps = 0
    async with PlainTaskGroup() as tasks:
        filling = tasks.create_task(queue.fill(tasks))
        while policy.version < config.run.steps and not stopping():
            watch = StepWatch(activity)
            stage("generate")
            groups, replaced = await _draw(queue, replay, policy.version, settings)
            watch.mark("groups")
            barren_steps = _check_signal(fresh(groups), barren_steps, settings)

            stage("update")
            batch = await computed(build_batch, groups, config, policy.version, replaced=replaced)
            _check_unscored(groups, batch, config)
            update = await whole(computed(_update, policy, batch, activity))
            watch.mark("update")
            if not update.discarded:  # else it may be a group of these that is not finite
                replay.keep(filter(has_signal, groups), policy.version)
            stage("load weights")
            measured: dict[str, float] = {}
            try:
                with activity.trainer(f"waits for the engine to load the weights of version {policy.version}"):
                    await engine.load_weights(await computed(policy.weights), policy.version)
                watch.mark("load")
                measured = await measure(groups, update.metrics)
            finally:
                metrics = _metrics(policy.version, groups, update, watch, settings) | measured
                here = Place(queue.position, queue.ahead, replay.groups)
                with activity.trainer(f"writes down step {policy.version}"):
                    await whole(record(Step(policy.version, groups, batch, update, metrics, here)))
            check_discarded(policy, config)
            await evaluate()
            # Only now, with the new weights live in the engine, may as many new groups start; and only after the
            # evaluation, so that it is not batched with them: a resumed run has it to the last digit.
            queue.release(settings.groups_per_step)
        filling.cancel()
        queue.cancel()


def _queue(roller: Roller, prompts: PromptSource, settings: RolloutSettings, ahead: Collection[int]) -> RolloutQueue:
    return RolloutQueue(
        roller.train_group,
        prompts,
        groups_per_step=settings.groups_per_step,
        max_staleness=settings.max_staleness,
        ahead=ahead,
        activity=roller.activity,
    )


def _update(policy: Trainee, batch: Batch, activity: Activity) -> Update:
    with activity.update(policy.version + 1):
        return policy.update(batch)


def _metrics(
    version: int, groups: Sequence[Group], update: Update, watch: StepWatch, settings: RolloutSettings
) -> dict[str, float]:
    """Of the step that made this version; rollouts and timings are of the groups that were sampled for it."""
    sampled = fresh(groups)
    counts = {"step": float(version), "rollout/refilled_groups": float(len(sampled) - settings.groups_per_step)}
    if settings.replay_max_staleness:
        counts["rollout/replayed_groups"] = float(len(groups) - len(sampled))
    return counts | rollout_metrics(sampled) | update.metrics | watch.metrics(sampled)


async def _draw(
    queue: RolloutQueue, replay: ReplayBuffer, policy_version: int, settings: RolloutSettings
) -> tuple[list[Group], frozenset[int]]:
    """The groups of a step, and which of them others stand in for.

    For groups without signal at most `refill` further ones are drawn; for what still lacks, groups are replayed.
    Raises StalenessError, and RewardError if too many rollouts failed.
    """
    wanted, left = settings.groups_per_step, settings.refill
    groups = await queue.take(wanted)
    while left > 0 and (missing := wanted - sum(map(has_signal, groups))) > 0:
        extra = await queue.refill(min(missing, left))
        left -= len(extra)
        groups = groups + extra
    check_failures(groups, settings.max_failed_fraction)
    groups = groups + replay.take(wanted - sum(map(has_signal, groups)), policy_version)
    check_staleness(groups, policy_version, settings.max_staleness, settings.replay_max_staleness)
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


def check_discarded(policy: Trainee, config: Config) -> None:
    """Raise TrainingError if too many optimizer steps in a row were discarded."""
    if policy.discarded_in_a_row >= config.optimizer.max_discarded_steps:
        raise TrainingError(
            f"optimizer.max_discarded_steps is {config.optimizer.max_discarded_steps}, but as many optimizer steps in a "
            "row had a loss or gradient that is not finite. The weights are untouched, and nothing is learned. "
            "Look into blackbox/ for the rollouts, and lower the learning rate if logits overflow."
        )
