"""What a step costs besides its work: little, and the same however long the run."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from leadline.session import Session
from leadline.train import Step
from tests.test_session import config, opened

PER_YARDSTICK = 4.3
"""The goal: 20 ms where the yardstick takes 4.7. A record, all its threads together, takes 13, and the loop waits for half."""
GROWTH = 1.5
STEPS = 12
"""So many records are averaged, and the median of three averages counts."""


def yardstick() -> float:
    """CPU seconds of a fixed piece of plain Python."""
    started = time.process_time()
    sum(i * i for i in range(100_000))
    return time.process_time() - started


def recorded(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of its run."""
    steps: list[Step] = []
    record = Session._record

    async def noted(self: Session, step: Step) -> None:
        steps.append(step)
        await record(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_record", noted)
        asyncio.run(session.run())
    return steps


def cost(session: Session, steps: Sequence[Step], first: int) -> float:
    """CPU seconds, of all threads, to record the steps again under numbers from `first` on, each."""

    async def record() -> float:
        started = time.process_time()
        for place, step in enumerate(steps):
            number = first + place
            metrics = {**step.metrics, "step": float(number)}
            await session._record(replace(step, number=number, metrics=metrics))
        session._writer.finish()
        return (time.process_time() - started) / len(steps)

    return asyncio.run(record())


def test_recording_a_step_is_cheap_and_no_dearer_at_step_400_than_at_step_40(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"run": {"steps": STEPS, "checkpoint_every": 0, "rollouts_every": 1}, "eval": {"prompts": 0}}
    session = opened(config(**sections), tmp_path / "run")
    steps = recorded(session, monkeypatch)
    yards, early, late = [], [], []
    rows = list(session.rows)
    for turn in range(3):
        for first, costs in ((40, early), (400, late)):
            yards.append(yardstick())
            begin = first + turn * STEPS
            session.rows[:] = [{**rows[i % STEPS], "step": float(i + 1)} for i in range(begin - 1)]
            costs.append(cost(session, steps, begin))
    assert statistics.median(late) < PER_YARDSTICK * statistics.median(yards)
    assert statistics.median(late) < GROWTH * statistics.median(early)
