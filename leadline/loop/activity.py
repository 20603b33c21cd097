"""Who does what in a run, and since when: told by whoever does it, read by the watchdog and by the timings of a step."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from leadline.numerals import duration


@dataclass(slots=True)
class Work:
    """Something under way, or somebody who waits."""

    name: str
    """Of a group: "prompt 17". Of the trainer: what it does, "waits for the group of prompt 17"."""
    since: float
    waits_for: str = ""
    """Of a group, e.g. "the engine"."""


class Activity:
    """What is under way. Whatever begins or ends here is a sign of life. Threads may tell and ask at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._trainer: list[Work] = []
        self._groups: list[Work] = []
        self._changing = 0
        self._last = clock()
        self._rolling_since = 0.0
        self._rolled = 0.0

    @contextmanager
    def trainer(self, does: str) -> Iterator[None]:
        """Meanwhile the trainer does this, e.g. "waits for the group of prompt 17"."""
        work = Work(does, self._clock())
        self._begin(self._trainer, work)
        try:
            yield
        finally:
            self._end(self._trainer, work)

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Meanwhile the weights change to those of `version`. Told by the thread that changes them, for as long."""
        with self.trainer(f"makes the update to version {version}"):
            self._changing += 1
            try:
                yield
            finally:
                self._changing -= 1

    @contextmanager
    def group(self, prompt_index: int) -> Iterator[Callable[[str], None]]:
        """Meanwhile a group of the prompt is made. What it yields is called with whom the group now waits for."""
        work = Work(f"prompt {prompt_index}", self._clock())
        with self._lock:
            if not self._groups:
                self._rolling_since = work.since
        self._begin(self._groups, work)

        def waits_for(whom: str) -> None:
            work.waits_for = whom
            self._last = work.since = self._clock()

        try:
            yield waits_for
        finally:
            self._end(self._groups, work)
            with self._lock:
                if not self._groups:
                    self._rolled += self._clock() - self._rolling_since

    @property
    def weights_change(self) -> bool:
        """Whether an update is under way: what is saved meanwhile would be half of both."""
        return self._changing > 0

    @property
    def quiet_seconds(self) -> float:
        """Since something last began or ended."""
        return self._clock() - self._last

    @property
    def rolling_seconds(self) -> float:
        """So far, with at least one group under way."""
        with self._lock:
            return self._rolled + (self._clock() - self._rolling_since if self._groups else 0.0)

    def told(self) -> str:
        """Who waits for whom, and for how long, in sentences."""
        with self._lock:
            trainer, groups = list(self._trainer), list(self._groups)
        now = self._clock()
        sentences = [f"The trainer {work.name}, for {duration(now - work.since)}." for work in trainer[-1:]]
        for what in dict.fromkeys(work.waits_for for work in groups):
            waiting = [work for work in groups if work.waits_for == what]
            who = "1 group waits" if len(waiting) == 1 else f"{len(waiting)} groups wait"
            oldest = min(waiting, key=lambda work: work.since)
            sentences.append(f"{who} for {what} (longest: {oldest.name}, for {duration(now - oldest.since)}).")
        if not groups:
            sentences.append("No group is under way: the engine waits for the trainer.")
        return " ".join(sentences)

    def _begin(self, works: list[Work], work: Work) -> None:
        with self._lock:
            works.append(work)
            self._last = work.since

    def _end(self, works: list[Work], work: Work) -> None:
        with self._lock:
            works.remove(work)
            self._last = self._clock()
