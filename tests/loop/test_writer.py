import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leadline.loop.writer import Writer
from leadline.run_dir import RunDir
from tests.test_session import config, opened


def test_work_is_done_in_order_and_all_of_it_before_finish_returns() -> None:
    done: list[int] = []

    async def run() -> None:
        writer = Writer()
        for number in range(5):
            await writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
        writer.finish()

    asyncio.run(run())
    assert done == [0, 1, 2, 3, 4]


def test_the_loop_goes_on_while_one_piece_is_written_and_waits_before_a_second() -> None:
    async def run() -> list[str]:
        writer, gate, seen = Writer(), threading.Event(), []
        await writer.put(lambda: (gate.wait(10), seen.append("first"))[1])
        seen.append("loop")
        second = asyncio.create_task(writer.put(lambda: seen.append("second")))
        await asyncio.sleep(0.05)
        assert not second.done()
        gate.set()
        await second
        writer.finish()
        return seen

    assert asyncio.run(run()) == ["loop", "first", "second"]


def test_an_error_is_raised_where_the_work_is_next_waited_for_and_once() -> None:
    def full() -> None:
        raise OSError("disk full")

    async def run() -> None:
        writer, done = Writer(), []
        await writer.put(full)
        with pytest.raises(OSError, match="disk full"):
            await writer.put(lambda: done.append("after"))
        writer.finish()
        assert done == []
        await writer.put(full)
        with pytest.raises(OSError, match="disk full"):
            writer.finish()

    asyncio.run(run())


def test_a_checkpoint_is_of_steps_whose_rollouts_are_written_however_slow_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(config(run={"steps": 2, "checkpoint_every": 1}, eval={"prompts": 0}), tmp_path / "run")
    write, save, written = RunDir.write_rollouts, RunDir.save_checkpoint, []

    def slow(self: RunDir, *arguments: Any) -> None:
        time.sleep(0.2)
        write(self, *arguments)

    def seen(self: RunDir, *arguments: Any) -> None:
        written.append(len(list(self.rollouts.glob("*.parquet"))))
        save(self, *arguments)

    monkeypatch.setattr(RunDir, "write_rollouts", slow)
    monkeypatch.setattr(RunDir, "save_checkpoint", seen)
    asyncio.run(session.run())
    assert written[:2] == [1, 2]
