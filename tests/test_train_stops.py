"""What stops a run, and what it leaves."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from leadline import train as loop
from leadline.config import Config
from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.errors import EngineError, LeadlineError, NoSignalError, RewardError, TrainingError
from leadline.models import load_model
from leadline.policy.policy import Policy
from leadline.train import Step
from leadline.types import Completion, Prompt
from tests.builders import same, settings, snapshot
from tests.loops import CountingPolicy, barren, config, lengths, roller, run, stream


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
