import asyncio

import pytest

from leadline.errors import EngineError
from leadline.loop.concurrency import PlainTaskGroup, whole


async def fails(error: Exception) -> None:
    raise error


async def fails_when_cancelled(error: Exception) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        raise error


@pytest.mark.parametrize("first", [ValueError("a defect"), EngineError("gone")])
def test_the_error_of_a_task_comes_out_as_itself_and_ours_before_a_defect(first: Exception) -> None:
    async def main() -> None:
        async with PlainTaskGroup() as tasks:
            tasks.create_task(fails_when_cancelled(EngineError("gone")))
            await asyncio.sleep(0)
            tasks.create_task(fails(first))

    with pytest.raises(EngineError, match="gone") as caught:
        asyncio.run(main())
    assert not isinstance(caught.value.__context__, BaseExceptionGroup)


def test_without_an_error_a_group_ends_as_any_other() -> None:
    async def main() -> str:
        async with PlainTaskGroup() as tasks:
            task = tasks.create_task(asyncio.sleep(0, "done"))
        return task.result()

    assert asyncio.run(main()) == "done"


def test_what_must_be_whole_ends_before_the_cancellation_goes_on() -> None:
    happened: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        happened.append("done")

    async def main() -> None:
        task = asyncio.create_task(whole(work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        happened.append("cancelled")

    asyncio.run(main())
    assert happened == ["done", "cancelled"]


def test_it_returns_what_the_work_returns() -> None:
    assert asyncio.run(whole(asyncio.sleep(0, 3))) == 3
