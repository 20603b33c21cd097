"""Nothing hangs for ever: a thread that sees when a run stands still, says who waits for whom, and ends it in the end.

It is a thread, so that it also sees an event loop that is blocked. Three things happen, one after another:

    warning   nothing has moved for `run.stall_warning_s`: it is said who waits for whom
    limit     nothing has moved for `run.stall_limit_s`: the run is asked to stop, and leaves a checkpoint
    leaving   it did not stop within `GRACE_S`: the tracebacks of all threads are written down, a checkpoint is tried, and
              the process ends, whatever hangs in it
"""

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Never, Self

from leadline.errors import StalledError
from leadline.loop.activity import Activity
from leadline.numerals import duration

GRACE_S = 60.0
"""For a run that was asked to stop, and once more for the last checkpoint."""
TICK_S = 1.0


def leave_at_once(code: int) -> Never:
    """The process ends now, with the terminal as it was. Threads that hang are not waited for."""
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h")  # the live screen hides the cursor
    os._exit(code)


class Watchdog:
    """Watches an `Activity` while it is entered.

    `say` gets every line for a person; `rescue` is called when the process has to be left; `tracebacks` is where it then
    stood.
    """

    def __init__(
        self,
        activity: Activity,
        *,
        warning_s: float,
        limit_s: float,
        say: Callable[[str], None],
        rescue: Callable[[], None],
        tracebacks: Path,
        leave: Callable[[int], object] = leave_at_once,
    ) -> None:
        self._activity = activity
        self._warning_s, self._limit_s = warning_s, limit_s
        self._say, self._rescue, self._leave = say, rescue, leave
        self._tracebacks = tracebacks
        self._over = threading.Event()
        self._longest = 0.0
        self._error: StalledError | None = None
        self._asked_at = 0.0
        self._wake: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True, name="leadline-watchdog").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()

    async def until_stalled(self) -> Never:
        """Raises StalledError when the run is to stop; else it is waited for in vain, until cancelled."""
        stalled, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(stalled.set)
        await stalled.wait()
        assert self._error is not None
        raise self._error

    def _watch(self) -> None:
        while not self._over.wait(min(TICK_S, self._warning_s / 4)):
            if self._error is None:
                self._look(self._activity.quiet_seconds)
            elif time.monotonic() - self._asked_at > GRACE_S:
                self._end()
                return

    def _look(self, quiet: float) -> None:
        if quiet < self._warning_s:
            if self._longest:
                self._say(f"The run moves again, after {duration(self._longest)}.")
            self._longest = 0.0
            return
        if not self._longest:
            self._say(f"Nothing has moved for {duration(quiet)} (run.stall_warning_s). {self._activity.told()}")
        self._longest = quiet
        if quiet >= self._limit_s:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        self._error = StalledError(
            f"run.stall_limit_s is {self._limit_s:g}, but nothing has moved for longer. {self._activity.told()} It might "
            "be waited for in vain for ever. Look at what is waited for, or raise run.stall_limit_s; then continue with "
            "--resume."
        )
        self._asked_at = time.monotonic()
        self._wake()

    def _end(self) -> None:
        self._say(
            f"{self._error} The run was asked to stop and did not within {duration(GRACE_S)}: the process ends now. Where "
            f"it stands is in {self._tracebacks}."
        )
        with self._tracebacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        rescue = threading.Thread(target=self._rescue, daemon=True)
        rescue.start()
        rescue.join(GRACE_S)
        self._leave(2)
