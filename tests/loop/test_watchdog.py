"""A run that stands still says who waits for whom, stops with a checkpoint, and never hangs for ever."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from leadline.errors import StalledError
from leadline.loop import watchdog as watchdogs
from leadline.loop.activity import Activity
from leadline.loop.watchdog import Watchdog
from leadline.session import Session
from tests.processes import CONTEXT
from tests.test_session import checkpoints, config, evaluated, opened, printed, run, steps, trained

QUICK = {"stall_warning_s": 0.4, "stall_limit_s": 1.2}


# The dog alone --------------------------------------------------------------------------------------------------------


class Watched:
    """A watchdog on a short clock, and what it did."""

    def __init__(self, tmp_path: Path, warning_s: float = 0.05, limit_s: float = 0.2) -> None:
        self.activity = Activity()
        self.said: list[str] = []
        self.left: list[int] = []
        self.rescued = 0
        self.tracebacks = tmp_path / "stalled.txt"
        self.dog = Watchdog(
            self.activity,
            warning_s=warning_s,
            limit_s=limit_s,
            say=self.said.append,
            rescue=self._rescue,
            tracebacks=self.tracebacks,
            leave=self.left.append,
        )

    def _rescue(self) -> None:
        self.rescued += 1


def test_it_warns_once_and_says_when_the_run_moves_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, limit_s=60)
    with watched.dog:
        with watched.activity.trainer("waits for the group of prompt 3"):
            time.sleep(0.2)
        time.sleep(0.04)
    assert len(watched.said) == 2
    assert watched.said[0].startswith("Nothing has moved for ")
    assert "The trainer waits for the group of prompt 3" in watched.said[0]
    assert watched.said[1].startswith("The run moves again, after ")


def test_it_is_silent_while_something_begins_or_ends(tmp_path: Path) -> None:
    watched = Watched(tmp_path, warning_s=0.3)
    with watched.dog:
        for _ in range(12):
            with watched.activity.group(1):
                time.sleep(0.05)
    assert watched.said == []


def test_at_the_limit_whoever_asked_gets_the_error(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with watched.dog, watched.activity.trainer("waits for what never comes"), pytest.raises(StalledError) as caught:
        asyncio.run(asyncio.wait_for(watched.dog.until_stalled(), 5))
    assert "run.stall_limit_s is 0.2, but nothing has moved for longer. The trainer waits for what never comes" in str(
        caught.value
    )
    assert watched.left == []


def test_a_run_that_does_not_stop_is_left_after_a_rescue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdogs, "GRACE_S", 0.1)
    watched = Watched(tmp_path)
    release = threading.Event()

    def hangs_here() -> None:
        with watched.activity.trainer("hangs"):
            release.wait(5)

    threading.Thread(target=hangs_here, daemon=True).start()
    with watched.dog:
        until = time.monotonic() + 5
        while not watched.left and time.monotonic() < until:
            time.sleep(0.01)
    release.set()
    assert (watched.left, watched.rescued) == ([2], 1)
    assert "hangs_here" in watched.tracebacks.read_text()
    assert "the process ends now" in watched.said[-1]


def test_a_rescue_that_hangs_too_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdogs, "GRACE_S", 0.1)
    watched = Watched(tmp_path)
    watched.dog._rescue = lambda: time.sleep(5)
    with watched.dog:
        until = time.monotonic() + 3
        while not watched.left and time.monotonic() < until:
            time.sleep(0.01)
    assert watched.left == [2]


# A run that stands still ----------------------------------------------------------------------------------------------


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


def hang_at(session: Session, what: str, version: int) -> None:
    """From this version of the policy on, the engine's `what` never returns."""
    call: Callable[..., Awaitable[Any]] = getattr(session.engine, what)

    async def hangs(*arguments: Any) -> Any:
        return await (never if session.policy.version >= version else call)(*arguments)

    setattr(session.engine, what, hangs)


def stalled(session: Session) -> str:
    """The error with which the watched run stops, in good time."""
    begun = time.monotonic()
    with session.watchdog, pytest.raises(StalledError) as caught:
        run(session)
    assert time.monotonic() - begun < 20
    return str(caught.value)


def told(path: Path) -> list[str]:
    return [json.loads(line)["said"] for line in (path / "stalls.jsonl").read_text().splitlines()]


def goes_on(path: Path, steps_before: int, **sections: Any) -> None:
    """The run is resumed and ends, with no prompt lost and none trained twice."""
    assert checkpoints(path)[-1] == f"step_{steps_before:06d}"
    session = opened(config(**sections), path, resume=True)
    run(session)
    assert session.finished and steps(path) == [1, 2, 3, 4]
    assert [index for step in range(1, 5) for index in trained(path, step)] == list(range(8))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_engine_that_hangs_is_named_and_the_run_stops_with_a_checkpoint(tmp_path: Path, max_staleness: int) -> None:
    path, sections = tmp_path / "run", {"rollout": {"max_staleness": max_staleness}}
    sections["rollout"] |= {"group_size": 3, "groups_per_step": 2}
    session = opened(config(run={"checkpoint_every": 0, **QUICK}, **sections), path)
    hang_at(session, "generate", 3 - max_staleness)
    error = stalled(session)
    assert (
        "groups wait for the engine (longest: prompt" in error and "The trainer waits for the group of prompt" in error
    )
    assert "Nothing has moved for" in told(path)[0] and "wait for the engine" in told(path)[0]
    assert "Nothing has moved for" in printed(session)
    goes_on(path, 3, **sections)


def test_a_load_of_weights_that_hangs_is_named_and_the_step_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(run={"checkpoint_every": 0, **QUICK}), path)
    hang_at(session, "load_weights", 3)
    assert "The trainer waits for the engine to load the weights of version 3" in stalled(session)
    assert steps(path) == [1, 2, 3]
    goes_on(path, 3)


def test_an_evaluation_that_hangs_is_named_and_done_after_all_by_the_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(run={"checkpoint_every": 0, **QUICK}, eval={"prompts": 3, "every": 2}), path)
    hang_at(session, "generate", 2)
    assert "The trainer evaluates on 3 held-out prompts" in stalled(session)
    goes_on(path, 2, eval={"prompts": 3, "every": 2})
    assert evaluated(path) == [0, 2, 4]


asked = {"times": 0}


async def hanging(completion_ids: Sequence[int]) -> float:
    asked["times"] += 1
    if asked["times"] > 3 + 2 * 6:
        await never()
    return float(sum(completion_ids))


def test_a_reward_that_hangs_is_named_and_the_run_stops_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.loop.test_watchdog import asked  # the module that the reward is imported from

    monkeypatch.setitem(asked, "times", 0)
    path, rewards = tmp_path / "run", [{"name": "tests.loop.test_watchdog:hanging", "timeout_s": 1e6}]
    session = opened(config(run={"checkpoint_every": 0, **QUICK}, rewards=rewards), path)
    assert "2 groups wait for rewards (longest: prompt 4" in stalled(session)
    monkeypatch.setitem(asked, "times", -100)
    goes_on(path, 2, rewards=rewards)


def test_a_run_that_was_only_slow_goes_on_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(run={"stall_warning_s": 0.4}), path)
    call = session.engine.load_weights

    async def slow(weights: Any, version: int) -> None:
        if version == 2:
            await asyncio.sleep(1)
        await call(weights, version)

    session.engine.load_weights = slow  # type: ignore[method-assign]
    with session.watchdog:
        run(session)
    assert session.finished
    first, last = told(path)[:2]
    assert "waits for the engine to load the weights of version 2" in first and "moves again" in last


# What no cancellation reaches -----------------------------------------------------------------------------------------


async def blocking(completion_ids: Sequence[int]) -> float:
    """Blocks the event loop, as a request without await does, once two steps are made."""
    asked["times"] += 1
    if asked["times"] > 3 + 2 * 6:
        time.sleep(1000)
    return float(sum(completion_ids))


def _train(path: Path, output: Path, reward: str, hanging_update: int) -> None:
    """In a process of its own: a run with short patience, whose update may hang."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    watchdogs.GRACE_S = 0.5
    session = opened(config(run={"checkpoint_every": 0, **QUICK}, rewards=[{"name": reward}]), path)
    update = session.policy.update

    def maybe_hanging(batch: Any) -> Any:
        if session.policy.version + 1 == hanging_update:
            session.policy.model.lm_head.weight.data.zero_()  # type: ignore[union-attr, operator]
            time.sleep(1000)
        return update(batch)

    session.policy.update = maybe_hanging  # type: ignore[method-assign]
    with session.watchdog:
        run(session)


@pytest.mark.parametrize(
    ("reward", "hanging_update", "where", "saved"),
    [
        ("tests.loop.test_watchdog:blocking", 0, "in blocking", ["step_000002"]),
        ("tests.loops:token_sum", 3, "in maybe_hanging", []),
    ],
)
def test_what_hangs_for_good_is_left_with_what_can_be_saved(
    tmp_path: Path, reward: str, hanging_update: int, where: str, saved: list[str]
) -> None:
    """A blocked event loop leaves the weights between two steps: they are saved. Those of a half-made update never are."""
    path = tmp_path / "run"
    process = CONTEXT.Process(target=_train, args=(path, tmp_path / "out", reward, hanging_update))
    process.start()
    process.join(60)
    assert process.exitcode == 2, (tmp_path / "out").read_text()
    assert checkpoints(path) == saved
    assert where in (path / "stalled.txt").read_text()
    assert steps(path) == [1, 2]
    assert "the process ends now" in told(path)[-1]
