"""Ctrl-C while a run trains: the first asks for a stop between two steps, the second leaves at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from leadline.loop.watchdog import leave_at_once


class StopOnce:
    """The first signal asks for a stop after the step; the second leaves at once, which costs the steps since the last
    checkpoint and nothing else."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signum: int, frame: object) -> None:
        if self.asked:
            leave_at_once(130)
        self.asked = True
        os.write(2, b"\nStopping after this step, with a checkpoint. Ctrl-C again leaves at once.\n")


@contextmanager
def left_at_once() -> Iterator[None]:
    """Inside, Ctrl-C that nobody else hears ends the process: nothing is lost, and what is computed is not waited for."""
    try:
        yield
    except KeyboardInterrupt:
        leave_at_once(130)


@contextmanager
def heard(stop: StopOnce) -> Iterator[None]:
    """Inside, Ctrl-C goes to `stop`; afterwards to whoever had it before."""
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
