import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch

from leadline import train as loop
from leadline.config import Config
from leadline.engines.hf import HFEngine
from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.errors import EngineError, LeadlineError, NoSignalError, RewardError, StalenessError, TrainingError
from leadline.loop.rollout_queue import RolloutQueue
from leadline.models import load_model
from leadline.policy.batch import build_batch
from leadline.policy.policy import Policy
from leadline.rewards.length import length
from leadline.train import Step
from leadline.types import Completion, Group, Prompt
from tests.builders import same, settings, snapshot
from tests.loops import CountingPolicy, SlowLoading, completion, lengths, roller, run, stream

short = partial(length, target=1, slack=16)
"""A reward that a tiny model can learn: end at once."""


def config(*, steps: int = 6, **rollout: Any) -> Config:
    return settings(
        rollout={"group_size": 4, "groups_per_step": 3, **rollout}, run={"steps": steps}, eval={"prompts": 0}
    )


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


def barren(*indices: int) -> Callable[[Prompt, int], list[Completion]]:
    """A script in which all completions of these prompts are alike."""
    return lambda prompt, n: [completion(1)] * n if prompt.index in indices else lengths(prompt, n)


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


# What stops a run -----------------------------------------------------------------------------------------------------


def test_failures_below_the_limit_are_counted_and_trained_around() -> None:
    def picky(completion_ids: Sequence[int]) -> float:
        if len(completion_ids) == 1:
            raise ValueError("too short")
        return float(len(completion_ids))

    steps = run(config(steps=2), ScriptedEngine(lengths), reward=picky)
    assert [step.metrics["rollout/failed_fraction"] for step in steps] == [0.25, 0.25]
    assert all(lost == "failed" for lost in steps[0].batch.lost_at[::4])


def test_failures_above_the_limit_stop_the_run_with_the_first_of_them() -> None:
    served = itertools.count()

    def flaky(completion_ids: Sequence[int]) -> float:
        if next(served) >= 12:
            raise ConnectionError("the judge is away")
        return float(len(completion_ids))

    policy = CountingPolicy()
    with pytest.raises(RewardError, match=r"12 of 12 rollouts .* the first: flaky: ConnectionError: the judge is away"):
        run(config(), ScriptedEngine(lengths), policy=policy, reward=flaky)
    assert policy.version == 1


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_error_of_the_engine_comes_out_as_itself(max_staleness: int) -> None:
    script = {index: lengths(Prompt(index, "", ()), 4) for index in range(6)}
    with pytest.raises(EngineError, match="0 completions for prompt 6") as caught:
        run(config(max_staleness=max_staleness), ScriptedEngine(script))
    assert not isinstance(caught.value.__context__, BaseExceptionGroup)


def test_the_cause_of_an_error_is_kept() -> None:
    class Offline(ScriptedEngine):
        async def generate(self, *args: Any) -> list[Completion]:
            raise EngineError("engine.urls is [...], but no server answers. Start one.") from ConnectionError("refused")

    with pytest.raises(EngineError) as caught:
        run(config(), Offline(lengths))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_defect_comes_out_as_itself_too() -> None:
    policy = CountingPolicy()
    policy.update = lambda batch: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        run(config(), ScriptedEngine(lengths), policy=policy)


@pytest.mark.parametrize(
    ("stage", "seen"),
    [("update begins", ["update begins", "update ends"]), ("record begins", ["record begins", "record ends"])],
)
def test_an_error_of_a_group_to_come_waits_for_the_update_or_the_record_that_is_under_way(
    stage: str, seen: list[str]
) -> None:
    """A checkpoint after the error must not meet half-trained weights, nor a half-written file."""
    happened: list[str] = []

    class Slow(CountingPolicy):
        def update(self, batch: Any) -> Any:
            happened.append("update begins")
            result = super().update(batch)
            happened.append("update ends")
            return result

    class Failing(ScriptedEngine):
        """The first group of the second step fails as soon as the stage of the first step has begun."""

        async def generate(self, prompt: Prompt, *args: Any) -> list[Completion]:
            while prompt.index == 3 and stage not in happened:
                await asyncio.sleep(0.001)
            if prompt.index == 3:
                raise EngineError("gone")
            return await super().generate(prompt, *args)

    async def record(step: Step) -> None:
        happened.append("record begins")
        await asyncio.sleep(0.05)
        happened.append("record ends")

    async def main() -> list[str]:
        engine = Failing(lengths)
        ahead = config(max_staleness=1)
        parts = {"policy": Slow(0.05), "prompts": stream(), "record": record}
        with pytest.raises(EngineError, match="gone"):
            await loop.train(ahead, engine=engine, roller=roller(ahead, engine), **parts)
        return list(happened)  # as it is when the error comes out

    assert asyncio.run(main())[-2:] == seen


def test_step_after_step_without_a_signal_stops_the_run() -> None:
    policy = CountingPolicy()
    settings = config(steps=9, max_steps_without_signal=3)
    with pytest.raises(NoSignalError, match=r"max_steps_without_signal is 3, .*\(the last: \[1\.0\]\)"):
        run(settings, ScriptedEngine(barren(*range(6, 99))), policy=policy)
    assert policy.version == 4  # two steps with a signal, two without; the third without is not trained


def test_one_step_with_a_signal_starts_the_count_again() -> None:
    settings = config(steps=6, max_steps_without_signal=3)
    assert len(run(settings, ScriptedEngine(barren(*range(6), *range(9, 15))))) == 6


def unscored(*indices: int) -> Callable[[Prompt, int], list[Completion]]:
    """A script whose groups have 10 tokens each, one of which is unscored for these prompts."""

    def script(prompt: Prompt, n: int) -> list[Completion]:
        first, *rest = lengths(prompt, n)
        return [replace(first, logprobs=(math.nan,)) if prompt.index in indices else first, *rest]

    return script


def objective(**values: Any) -> Config:
    return config(steps=1).model_copy(update={"objective": settings(objective=values).objective})


def test_few_unscored_tokens_are_trained_as_the_settings_say() -> None:
    (step,) = run(objective(on_unscored="on_policy"), ScriptedEngine(unscored(1)))
    assert bool(step.batch.loss_mask.all())
    (step,) = run(objective(on_unscored="drop"), ScriptedEngine(unscored(1)))
    assert (~step.batch.loss_mask).nonzero().tolist() == [[10]]


def test_more_unscored_tokens_than_allowed_stop_the_run_with_their_prompts_named() -> None:
    policy = CountingPolicy()
    match = r"max_unscored_fraction is 0\.05, but 2 of 30 tokens .* of the prompts 0, 2 \(by index\)"
    with pytest.raises(TrainingError, match=match):
        run(objective(), ScriptedEngine(unscored(0, 2)), policy=policy)
    assert policy.version == 0


def test_a_single_unscored_token_is_refused_if_the_settings_refuse_it() -> None:
    with pytest.raises(TrainingError, match=r"on_unscored is 'refuse', but 1 of 30 tokens .* of the prompts 1 "):
        run(objective(on_unscored="refuse"), ScriptedEngine(unscored(1)))
    assert len(run(objective(on_unscored="refuse"), ScriptedEngine(unscored(99)))) == 1


def test_too_many_discarded_optimizer_steps_in_a_row_stop_the_run_after_the_step_is_recorded() -> None:
    settings = config(steps=9)
    loaded = load_model(settings.model, seed=0)
    policy = Policy(loaded, settings)
    before = snapshot(policy.model)
    policy.model.lm_head.weight.register_hook(lambda grad: grad * math.nan)  # type: ignore[union-attr, operator]
    steps: list[Step] = []

    async def record(step: Step) -> None:
        steps.append(step)

    script = echo_script(vocab_size=260, eos_ids=loaded.eos_ids, max_tokens=8)
    with pytest.raises(TrainingError, match="max_discarded_steps is 3"):
        run(settings, ScriptedEngine(script), policy=policy, record=record)
    assert [step.update.discarded for step in steps] == [True] * 3
    assert all(math.isnan(step.metrics["optimizer/grad_norm"]) for step in steps)
    assert same(before, snapshot(policy.model))


def test_every_error_above_is_one_that_the_command_line_prints_plainly() -> None:
    assert all(issubclass(e, LeadlineError) for e in (EngineError, NoSignalError, RewardError, TrainingError))


def test_a_run_leaves_no_task_behind() -> None:
    """A rollout that goes on after the loop would ask a closed engine, or score with nobody listening."""

    async def main() -> int:
        engine = ScriptedEngine(lengths, delay=lambda prompt: 0.001)
        settings = config(steps=2, max_staleness=3)
        part = roller(settings, engine)

        async def record(step: Step) -> None: ...

        await loop.train(settings, policy=CountingPolicy(), engine=engine, roller=part, prompts=stream(), record=record)
        return len(asyncio.all_tasks())

    begun = time.perf_counter()
    assert asyncio.run(main()) == 1
    assert time.perf_counter() - begun < 5
    assert torch.is_grad_enabled()
