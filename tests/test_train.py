import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pytest

from leadline import train as loop
from leadline.config import Config
from leadline.engines.hf import HFEngine
from leadline.engines.scripted import ScriptedEngine
from leadline.errors import EngineError, StalenessError
from leadline.loop.rollout_queue import RolloutQueue
from leadline.models import load_model
from leadline.policy.batch import build_batch
from leadline.policy.policy import Policy
from leadline.rewards.length import length
from leadline.train import Step
from leadline.types import Completion, Group, Prompt
from tests.builders import same, snapshot
from tests.loops import CountingPolicy, SlowLoading, barren, config, lengths, roller, run, stream

short = partial(length, target=1, slack=16)
"""A reward that a tiny model can learn: end at once."""


def real(config: Config) -> tuple[Policy, HFEngine]:
    loaded = load_model(config.model, seed=0)
    options = {"tokenizer": loaded.tokenizer, "eos_ids": loaded.eos_ids, "seed": 0}
    engine = HFEngine(loaded.model, own_copy=config.rollout.max_staleness > 0, **options)
    return Policy(loaded, config), engine


def short_texts(prompts: Sequence[Group]) -> list[list[tuple[Any, ...]]]:
    """All that was sampled and scored, comparable: groups hold NaN-free floats here."""
    return [[(r.completion, r.text, r.reward) for r in group.rollouts] for group in prompts]


# Synchronous is staleness 0 -------------------------------------------------------------------------------------------


def plain_loop(config: Config, policy: Policy, engine: HFEngine) -> list[list[Group]]:
    """Sample, train, load: what the loop is with nothing running ahead."""
    prompts, part = stream(), roller(config, engine, short)

    async def steps() -> list[list[Group]]:
        taken = []
        for _ in range(config.run.steps):
            drawn = [next(prompts) for _ in range(config.rollout.groups_per_step)]
            groups = list(await asyncio.gather(*map(part.train_group, drawn)))
            policy.update(build_batch(groups, config, policy.version))
            await engine.load_weights(policy.weights(), policy.version)
            taken.append(groups)
        await engine.close()
        return taken

    return asyncio.run(steps())


def test_with_staleness_0_the_loop_is_the_plain_synchronous_loop_bit_for_bit() -> None:
    settings = config(steps=5)
    policy, engine = real(settings)
    expected = plain_loop(settings, policy, engine)
    other, other_engine = real(settings)
    steps = run(settings, other_engine, policy=other, reward=short)
    assert [short_texts(step.groups) for step in steps] == [short_texts(groups) for groups in expected]
    assert same(snapshot(policy.model), snapshot(other.model))
    assert not same(snapshot(real(settings)[0].model), snapshot(other.model))  # it did move


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_a_real_engine_runs_ahead_up_to_the_bound_and_never_past_it(max_staleness: int) -> None:
    settings = config(steps=3 * max_staleness + 3, max_staleness=max_staleness)
    policy, engine = real(settings)
    update = policy.update

    def slow(batch: Any) -> Any:  # the engine has the time to fill every slot
        time.sleep(0.15)
        return update(batch)

    policy.update = slow  # type: ignore[method-assign]
    steps = run(settings, engine, policy=policy, reward=short)
    assert max(ages(steps)) == max_staleness
    assert [group.prompt.index for step in steps for group in step.groups] == list(range(3 * len(steps)))


def test_with_staleness_1_the_engine_runs_ahead_and_the_tiny_task_is_still_learned() -> None:
    settings = config(steps=14, max_staleness=1)
    policy, engine = real(settings)
    steps = run(settings, engine, policy=policy, reward=short)
    rewards = [step.metrics["reward/mean"] for step in steps]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.3
    assert max(step.metrics["staleness/max"] for step in steps) == 1


# The bound ------------------------------------------------------------------------------------------------------------


def ages(steps: Sequence[Step]) -> list[int]:
    """By step: the largest age of its tokens when it was trained."""
    return [int(step.batch.staleness.max()) for step in steps]


def slow_engine(seed: int = 0) -> SlowLoading:
    delays = random.Random(seed)
    return SlowLoading(lengths, delay=lambda prompt: delays.choice([0.0, 0.0, 0.002, 0.02]))


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_the_bound_of_staleness_is_reached_and_never_passed(max_staleness: int) -> None:
    steps = run(config(steps=12, max_staleness=max_staleness), slow_engine(), policy=CountingPolicy(0.002))
    assert [step.number for step in steps] == list(range(1, 13))
    assert max(ages(steps)) == max_staleness
    indices = [group.prompt.index for step in steps for group in step.groups]
    assert indices == list(range(36)), "groups are trained in the order in which they started"


class OneStepMore(RolloutQueue):
    """A queue whose formula is off by one step."""

    def __init__(self, *args: Any, max_staleness: int, **more: Any) -> None:
        super().__init__(*args, max_staleness=max_staleness + 1, **more)


class ReleasedWhenTaken(RolloutQueue):
    """A queue that lets new groups start before the weights of the old ones are loaded."""

    async def take(self, count: int) -> list[Group]:
        groups = await super().take(count)
        super().release(count)
        await asyncio.sleep(0)
        return groups

    def release(self, count: int) -> None:
        pass


@pytest.mark.parametrize("queue", [OneStepMore, ReleasedWhenTaken])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_queue_that_breaks_the_rule_of_admission_is_caught(
    queue: type[RolloutQueue], max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RolloutQueue", queue)
    with pytest.raises(StalenessError, match=f"max_staleness is {max_staleness}, but"):
        run(config(steps=12, max_staleness=max_staleness), slow_engine())


def test_nothing_is_sampled_while_a_step_is_recorded_if_the_loop_is_synchronous() -> None:
    """An evaluation there would share its batches with the next step's groups, and its last digits with the clock."""
    engine = ScriptedEngine(lengths)
    sampled: list[int] = []
    generate = engine.generate

    async def spy(prompt: Prompt, *args: Any) -> list[Completion]:
        sampled.append(prompt.index)
        return await generate(prompt, *args)

    engine.generate = spy  # type: ignore[method-assign]
    counts: list[int] = []

    async def record(step: Step) -> None:
        await asyncio.sleep(0.01)
        counts.append(len(sampled))

    run(config(steps=3), engine, record=record)
    assert counts == [3, 6, 9]


# What a step is -------------------------------------------------------------------------------------------------------


def test_each_step_is_recorded_with_its_groups_metrics_and_the_position_after_it() -> None:
    engine = ScriptedEngine(lengths)
    policy = CountingPolicy()
    steps = run(config(steps=3), engine, policy=policy)
    assert [step.number for step in steps] == [1, 2, 3] == engine.loaded
    assert [step.place.position for step in steps] == [3, 6, 9]
    assert [step.batch for step in steps] == policy.batches
    metrics = steps[1].metrics
    assert metrics["step"] == 2
    assert metrics["loss"] == 0.5
    assert metrics["reward/mean"] == 2.5
    assert metrics["rollout/refilled_groups"] == 0
    assert metrics["throughput/sampled_tokens_per_s"] == pytest.approx(30 / metrics["time/step_s"])
    assert metrics["time/step_s"] >= metrics["time/wait_for_rollouts_s"] > 0


def test_a_policy_that_has_made_steps_goes_on_from_there() -> None:
    policy, engine = CountingPolicy(), ScriptedEngine(lengths)
    policy.version = engine.version = 4
    steps = run(config(steps=6), engine, policy=policy)
    assert [step.number for step in steps] == [5, 6]


def test_a_finished_policy_makes_no_step() -> None:
    policy = CountingPolicy()
    policy.version = 6
    assert run(config(steps=6), ScriptedEngine(lengths), policy=policy) == []


def test_asked_to_stop_it_finishes_the_step_and_no_other() -> None:
    policy = CountingPolicy()
    steps = run(config(steps=6), ScriptedEngine(lengths), policy=policy, stopping=lambda: policy.version == 2)
    assert [step.number for step in steps] == [1, 2]


def test_what_is_measured_with_the_new_weights_is_part_of_the_step_and_not_of_its_time() -> None:
    engine, seen = ScriptedEngine(lengths), []

    async def measure(groups: Sequence[Group], metrics: dict[str, float]) -> dict[str, float]:
        seen.append((engine.version, [group.prompt.index for group in groups], metrics["loss"]))
        await asyncio.sleep(0.05)
        return {"importance/mine": float(engine.version)}

    steps = run(config(steps=2), engine, measure=measure)
    assert seen == [(1, [0, 1, 2], 0.5), (2, [3, 4, 5], 0.5)]
    assert [step.metrics["importance/mine"] for step in steps] == [1, 2]
    assert all(step.metrics["time/load_weights_s"] < 0.04 for step in steps)


@pytest.mark.parametrize("broken", ["load_weights", "measure"])
def test_a_step_is_recorded_though_the_engine_fails_after_its_update(broken: str) -> None:
    """It is trained: were it not written down, a resumed run would train its prompts again."""
    steps: list[Step] = []

    async def record(step: Step) -> None:
        steps.append(step)

    async def fail(*_: Any) -> Any:
        raise EngineError("no server answers")

    engine = ScriptedEngine(lengths)
    if broken == "load_weights":
        engine.load_weights = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no server answers"):
        run(config(steps=2), engine, record=record, **({"measure": fail} if broken == "measure" else {}))
    assert [(step.number, step.place.position) for step in steps] == [(1, 3)]


def test_the_stages_of_a_step_are_told_in_order() -> None:
    names: list[str] = []
    run(config(steps=2), ScriptedEngine(lengths), stage=names.append)
    assert names == ["generate", "update", "load weights"] * 2


# Refill ---------------------------------------------------------------------------------------------------------------


def test_groups_without_signal_are_replaced_by_further_ones_and_are_out_of_the_loss() -> None:
    (step,) = run(config(steps=1, refill=4), ScriptedEngine(barren(1, 3)))
    assert [group.prompt.index for group in step.groups] == [0, 1, 2, 3, 4]  # 3 had none either: 4 came for it
    assert step.metrics["rollout/refilled_groups"] == 2
    assert step.metrics["rollout/zero_signal_fraction"] == pytest.approx(2 / 5)
    in_loss = step.batch.loss_mask
    owners = step.batch.group_of_completion[step.batch.completion_of_token]
    assert set(owners[in_loss].tolist()) == {0, 2, 4}
    assert step.place.position == 5


def test_a_refill_draws_no_more_groups_than_it_may_and_keeps_the_groups_it_could_not_replace() -> None:
    (step,) = run(config(steps=1, refill=1), ScriptedEngine(barren(1, 2)))
    assert [group.prompt.index for group in step.groups] == [0, 1, 2, 3]
    (step,) = run(config(steps=1, refill=2), ScriptedEngine(barren(1, 2, 3)))
    assert [group.prompt.index for group in step.groups] == [0, 1, 2, 3, 4]
    owners = step.batch.group_of_completion[step.batch.completion_of_token]
    assert set(owners[step.batch.loss_mask].tolist()) == {0, 3, 4}  # the first two that lack a signal are replaced


def test_without_a_refill_groups_without_signal_stay_in_the_loss() -> None:
    (step,) = run(config(steps=1), ScriptedEngine(barren(1)))
    assert len(step.groups) == 3 and bool(step.batch.loss_mask.all())


def test_a_refill_is_sampled_from_the_newest_weights() -> None:
    steps = run(config(steps=4, refill=1, max_staleness=1), ScriptedEngine(barren(7)))
    assert [group.policy_version for group in steps[2].groups] == [1, 1, 1, 2]
