"""What multiplies does so on one thread, so that there is one OpenMP team."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from leadline.compute import computed, computes


@computes
def thread() -> str:
    return threading.current_thread().name


@computes
def nested() -> str:
    return thread()


@computes
def failing() -> None:
    raise ZeroDivisionError("of a user")


def test_every_caller_gets_the_same_thread() -> None:
    assert thread() == nested() == asyncio.run(computed(thread)) == asyncio.run(computed(nested))
    assert thread() != threading.current_thread().name


def test_an_error_comes_out_as_itself() -> None:
    with pytest.raises(ZeroDivisionError, match="of a user"):
        failing()
    with pytest.raises(ZeroDivisionError, match="of a user"):
        asyncio.run(computed(failing))


RUN = """
import asyncio, os, sys, threading, time
from pathlib import Path
import torch
from leadline.compute import computes
from leadline.screen import Screen
from leadline.session import open_session
from tests.engines.vllm_models import llama, saved
from tests.test_session import config


def native():
    time.sleep(0.5)  # until what ends has ended
    return len(os.listdir("/proc/self/task")) - threading.active_count()


place = Path(sys.argv[1])
# Matrices of a million entries: what is small, torch computes on one thread whatever is set.
model = saved(llama(tied=True, hidden_size=512, num_attention_heads=16, intermediate_size=2048), place / "model")


def run(name):
    recipe = config(model={"name": str(model)}, run={"steps": 2, "checkpoint_every": 1, "mismatch_every": 1})
    path = place / name
    session = open_session(recipe, path, resume=False, stopping=lambda: False, screen=Screen(recipe))
    close, counts = session.engine.close, []

    async def counted():  # before a thread of the engine's own would end, and its team with it
        counts.append(native())
        await close()

    session.engine.close = counted
    asyncio.run(session.run())
    return counts[0]


run("alone")  # on one thread, and whatever threads other libraries keep
torch.set_num_threads(2)
computes(torch.set_num_threads)(2)
before = native()
after = run("two")
torch.ones(10**6).exp()  # by the main thread
print(before, after, native())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's threads")
def test_a_run_has_one_team_of_threads(tmp_path: Path) -> None:
    # Passive: beside other tests two threads that wait for each other awake would take minutes.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    before, after, with_another = map(int, printed.splitlines()[-1].split())
    assert after == before + 1  # the second thread of the one team
    assert with_another == after + 1  # that is how a second team would show
