import time

import pytest

from leadline.engines.scripted import ScriptedEngine
from leadline.loop.activity import Activity
from leadline.loop.waiting import Bottleneck, StepWatch, bottleneck
from leadline.metrics import find
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import settings
from tests.loops import CountingPolicy, count, lengths, run

GROUP = Group(Prompt(0, "", (1,)), [Rollout(Completion((7,) * 30, (0.0,) * 30, (0,) * 30, FinishReason.EOS), "")])


def test_a_step_is_what_one_waited_for_the_other_and_overlap() -> None:
    activity = Activity()
    watch = StepWatch(activity)
    with activity.group(1):
        time.sleep(0.05)
        watch.mark("groups")
        time.sleep(0.03)
    time.sleep(0.04)
    watch.mark("update")
    metrics = watch.metrics([GROUP])
    assert all(find(name) for name in metrics)
    assert metrics["time/wait_for_rollouts_s"] == pytest.approx(0.05, abs=0.02)
    assert metrics["time/wait_for_trainer_s"] == pytest.approx(0.04, abs=0.02)
    assert metrics["time/overlap_share"] == pytest.approx(0.25, abs=0.1)
    parts = metrics["time/wait_for_rollouts_s"] + metrics["time/wait_for_trainer_s"]
    assert parts + metrics["time/overlap_share"] * metrics["time/step_s"] == pytest.approx(metrics["time/step_s"])
    assert metrics["throughput/sampled_tokens_per_s"] == pytest.approx(30 / metrics["time/step_s"])


def row(**seconds: float) -> dict[str, float]:
    return {f"time/{name}_s": value for name, value in seconds.items()}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (
            row(step=10, wait_for_rollouts=6.2, wait_for_trainer=1, generate=5, reward=1),
            ("trainer", "generation", 0.62),
        ),
        (row(step=10, wait_for_rollouts=6.2, wait_for_trainer=1, generate=1, reward=5), ("trainer", "rewards", 0.62)),
        (row(step=10, wait_for_rollouts=0, wait_for_trainer=3, generate=1, reward=5), ("engine", "training", 0.3)),
    ],
)
def test_the_bottleneck_is_what_the_other_side_waits_for(
    metrics: dict[str, float], expected: tuple[str, str, float]
) -> None:
    assert bottleneck([metrics]) == Bottleneck(*expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("metrics", [{}, row(step=10, wait_for_rollouts=0.9, wait_for_trainer=0.9)])
def test_there_is_none_where_nobody_waits_long_or_nothing_was_measured(metrics: dict[str, float]) -> None:
    assert bottleneck([metrics]) is None


def test_it_is_judged_over_all_steps_given() -> None:
    rows = [row(step=10, wait_for_trainer=5, wait_for_rollouts=0), row(step=30, wait_for_rollouts=20, generate=9)]
    assert bottleneck([*rows, {}]) == Bottleneck("trainer", "generation", 0.5)


def test_a_bottleneck_reads_in_words() -> None:
    assert str(Bottleneck("trainer", "generation", 0.62)) == "trainer waited 62 % for generation"


# In the loop ----------------------------------------------------------------------------------------------------------


def measured(
    *, engine_s: float, update_s: float, reward_s: float = 0, max_staleness: int = 0
) -> list[dict[str, float]]:
    """The timings of six steps, without the first two, in which the queue fills."""
    rollout = {"group_size": 2, "groups_per_step": 2, "max_staleness": max_staleness}

    async def slow(completion_ids: list[int]) -> float:
        import asyncio

        await asyncio.sleep(reward_s)
        return count(completion_ids)

    engine = ScriptedEngine(lengths, delay=lambda prompt: engine_s)
    config = settings(rollout=rollout, run={"steps": 6})
    return [step.metrics for step in run(config, engine, policy=CountingPolicy(update_s), reward=slow)][2:]


def test_a_synchronous_run_waits_on_both_sides_and_never_overlaps() -> None:
    for metrics in measured(engine_s=0.03, update_s=0.03):
        assert metrics["time/overlap_share"] < 0.1
        assert metrics["time/wait_for_rollouts_s"] > 0.025
        assert metrics["time/wait_for_trainer_s"] > 0.025


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"engine_s": 0.06, "update_s": 0.01}, "generation"),
        ({"engine_s": 0.01, "update_s": 0.06}, "training"),
        ({"engine_s": 0.01, "update_s": 0.01, "reward_s": 0.06}, "rewards"),
    ],
)
def test_the_slow_part_of_an_asynchronous_run_is_its_bottleneck(seconds: dict[str, float], expected: str) -> None:
    found = bottleneck(measured(max_staleness=1, **seconds))
    assert found is not None and found.waits_for == expected


def test_running_ahead_turns_waiting_into_overlap() -> None:
    ahead = measured(engine_s=0.04, update_s=0.04, max_staleness=1)
    assert sum(metrics["time/overlap_share"] for metrics in ahead) / len(ahead) > 0.5
