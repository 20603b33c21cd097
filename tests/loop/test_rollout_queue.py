import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from leadline.errors import StalenessError
from leadline.loop.rollout_queue import RolloutQueue, check_staleness
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.loops import stream


def group(prompt: Prompt, *versions: int) -> Group:
    completion = Completion((7,) * len(versions), (-1.0,) * len(versions), versions, FinishReason.EOS)
    return Group(prompt, [Rollout(completion, "", reward=1.0)])


class Started:
    """Rollouts that take the given seconds by prompt index, and how many have been started."""

    def __init__(self, seconds: Callable[[int], float] = lambda index: 0.0) -> None:
        self.indices: list[int] = []
        self._seconds = seconds

    async def __call__(self, prompt: Prompt) -> Group:
        self.indices.append(prompt.index)
        await asyncio.sleep(self._seconds(prompt.index))
        return group(prompt, 0)


@asynccontextmanager
async def filled(started: Started, *, groups_per_step: int, max_staleness: int) -> Any:
    queue = RolloutQueue(started, stream(), groups_per_step=groups_per_step, max_staleness=max_staleness)
    async with asyncio.TaskGroup() as tasks:
        filling = tasks.create_task(queue.fill(tasks))
        yield queue
        filling.cancel()
        queue.cancel()


def indices(groups: list[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def outcome(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 5))


def test_groups_come_in_the_order_in_which_they_started_however_long_each_takes() -> None:
    async def run() -> list[int]:
        started = Started(lambda index: 0.03 - 0.01 * (index % 4))
        async with filled(started, groups_per_step=4, max_staleness=1) as queue:
            taken = [*await queue.take(3), *await queue.take(5)]
        return indices(taken)

    assert outcome(run()) == list(range(8))


@pytest.mark.parametrize(("groups_per_step", "max_staleness", "held"), [(3, 0, 3), (3, 1, 6), (2, 4, 10), (1, 0, 1)])
def test_so_many_groups_are_held_and_no_more_until_some_are_released(
    groups_per_step: int, max_staleness: int, held: int
) -> None:
    async def run() -> Iterator[int]:
        started = Started()
        async with filled(started, groups_per_step=groups_per_step, max_staleness=max_staleness) as queue:
            await asyncio.sleep(0.01)
            first = len(started.indices)
            await queue.take(groups_per_step)
            await asyncio.sleep(0.01)
            taken = len(started.indices)
            queue.release(groups_per_step)
            await asyncio.sleep(0.01)
        return iter((first, taken, len(started.indices)))

    first, taken, released = outcome(run())
    assert (first, taken) == (held, held)
    assert released == held + groups_per_step


def test_taking_waits_for_groups_that_have_not_started_yet() -> None:
    async def run() -> list[int]:
        started = Started(lambda index: 0.005)
        async with filled(started, groups_per_step=2, max_staleness=0) as queue:
            taking = asyncio.create_task(queue.take(4))
            await asyncio.sleep(0.02)
            assert not taking.done()
            queue.release(2)
            return indices(await taking)

    assert outcome(run()) == [0, 1, 2, 3]


def test_the_position_is_that_of_the_first_prompt_not_yet_taken() -> None:
    async def run() -> list[int]:
        positions = []
        started = Started(lambda index: 0.001)
        async with filled(started, groups_per_step=2, max_staleness=1) as queue:
            positions.append(queue.position)
            await queue.take(2)
            positions.append(queue.position)
            await queue.take(2)
            positions.append(queue.position)
        return positions

    assert outcome(run()) == [0, 2, 4]


def test_a_refill_draws_the_next_prompts_outside_the_slots_and_does_not_move_what_is_started() -> None:
    async def run() -> tuple[list[int], list[int], int]:
        async with filled(Started(), groups_per_step=2, max_staleness=1) as queue:
            first = await queue.take(2)
            extra = await queue.refill(3)
            return indices(first), indices(extra), queue.position

    assert outcome(run()) == ([0, 1], [4, 5, 6], 2)


def test_prompts_that_a_refill_took_are_ahead_until_the_position_has_passed_them() -> None:
    async def run() -> list[tuple[int, ...]]:
        async with filled(Started(), groups_per_step=2, max_staleness=1) as queue:
            seen = [queue.ahead]
            await queue.take(2)
            await queue.refill(3)  # 4, 5 and 6, while 2 and 3 are started
            seen.append(queue.ahead)
            queue.release(2)
            await queue.take(4)  # 2 and 3, then 7 and 8
            seen.append(queue.ahead)
        return seen

    assert outcome(run()) == [(), (4, 5, 6), ()]


def test_prompts_that_are_ahead_are_passed_over_and_stay_ahead_for_the_next_resumption() -> None:
    async def run() -> tuple[list[int], list[int], tuple[int, ...], int]:
        started, prompts = Started(), stream()
        prompts.seek(2)
        queue = RolloutQueue(started, prompts, groups_per_step=2, max_staleness=1, ahead=(4, 6))
        async with asyncio.TaskGroup() as tasks:
            filling = tasks.create_task(queue.fill(tasks))
            first = await queue.take(1)
            await asyncio.sleep(0.001)
            extra = await queue.refill(1)
            filling.cancel()
            queue.cancel()
            return indices(first), indices(extra), queue.ahead, queue.position

    assert outcome(run()) == ([2], [8], (4, 6, 8), 3)


def test_cancelled_groups_are_stopped() -> None:
    stopped: list[int] = []

    async def endless(prompt: Prompt) -> Group:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(prompt.index)
            raise
        return group(prompt)

    async def run() -> None:
        async with filled(endless, groups_per_step=3, max_staleness=0):  # type: ignore[arg-type]
            await asyncio.sleep(0.001)

    outcome(run())
    assert stopped == [0, 1, 2]


@pytest.mark.parametrize("versions", [(3, 3), (2, 3), ()])
def test_a_group_within_the_bound_passes(versions: tuple[int, ...]) -> None:
    check_staleness([group(Prompt(8, "", (1,)), *versions)], policy_version=4, max_staleness=2)


def test_a_replayed_group_has_a_bound_of_its_own() -> None:
    again = replace(group(Prompt(8, "", (1,)), 1), replayed=True)
    check_staleness([again], policy_version=4, max_staleness=2, replay_max_staleness=3)
    with pytest.raises(StalenessError, match="replay_max_staleness is 3, but prompt 8 has tokens of version 1"):
        check_staleness([again], policy_version=5, max_staleness=9, replay_max_staleness=3)


def test_one_token_beyond_the_bound_is_an_error_that_names_the_prompt() -> None:
    groups = [group(Prompt(8, "", (1,)), 4), group(Prompt(9, "", (1,)), 4, 1, 4)]
    with pytest.raises(StalenessError, match=r"max_staleness is 2, but prompt 9 has tokens of version 1 at version 4"):
        check_staleness(groups, policy_version=4, max_staleness=2)
