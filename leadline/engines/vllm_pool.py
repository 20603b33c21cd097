"""The servers of an engine: which are live, where a request goes, and that each holds the newest weights.

A server is live or away. It is away from the moment it fails a request (connection, timeout, 5xx), its requests go to
others, and it is asked again and again until it answers. It is live again once it holds the newest weights: a server
that was restarted has those of its command line, which the name of its weights gives away.
"""

import asyncio
import math
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from leadline.engines.base import WeightPush
from leadline.engines.vllm_link import Link, ServerLost
from leadline.engines.vllm_logprobs import raw_notice, reports_raw
from leadline.engines.vllm_newest import Newest, newest_of
from leadline.engines.vllm_server import VLLMServer
from leadline.engines.vllm_wire import Ask
from leadline.errors import EngineError
from leadline.settings.rollout import EngineSettings
from leadline.types import Weights

HEALTH_EVERY_S = 5.0
MISSED_HEALTH = 3
"""So many unanswered questions in a row, and a live server is taken for hanging."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Between two tries to reach a server that is away; doubled from one to the next."""
ABORT_EVERY_S, ABORT_FOR_S = 0.5, 30.0
"""Running requests are aborted again and again, for one may arrive behind the abort; then their connections are cut."""

T = TypeVar("T")


class Pool:
    """Any number of vLLM servers. `server` is one that is started, kept running and stopped with the pool."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model_name: str | None,
        settings: EngineSettings,
        push: WeightPush | None,
        server: VLLMServer | None,
        say: Callable[[str], None],
    ) -> None:
        self.links = [Link(url, timeout_s=settings.request_timeout_s) for url in urls]
        self.newest: Newest | None = None
        self.closing = asyncio.Event()
        self._model_name = model_name
        self._settings = settings
        self._push_weights = push
        self._server = server
        self._say = say
        self._run = uuid.uuid4().hex[:12]  # in the names of weights: those of another run are not ours
        self._loads = 0
        self._tending: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._none_live_since = time.monotonic()

    def start(self) -> None:
        """The servers are being reached for, if they were not before. Raises EngineError if the pool is closed."""
        if self.closing.is_set():
            raise EngineError(
                "The vLLM engine is closed, but it was asked for more. Nothing can run. Make a new engine."
            )
        if self._tending:
            return
        key = os.environ.get("VLLM_API_KEY")
        self._none_live_since = time.monotonic()
        for link in self.links:
            link.open_connection({"Authorization": f"Bearer {key}"} if key else {})
        self._tending = [asyncio.create_task(self._watched(self._tend, link)) for link in self.links]
        if self._server is not None:
            self._none_live_since = math.inf  # it may take its time to start
            self._tending.append(asyncio.create_task(self._watched(self._supervise, self._server)))

    async def close(self) -> None:
        """Requests under way are taken back, and a server of our own has ended."""
        self.closing.set()
        tasks = [*self._tending, *(attempt for link in self.links for attempt in link.attempts)]
        for task in tasks:
            task.cancel()
        self._signal()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tending:
            await asyncio.gather(*(link.close() for link in self.links))
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    # Where requests go -----------------------------------------------------------------------------------------------

    async def place(self, ask: Ask) -> Link | None:
        """A server for the request; None if the pool is closed. Raises EngineError after `engine.patience_s`."""
        while not self.closing.is_set():
            if self._failure is not None:
                raise self._failure
            ready = [link for link in self.links if link.live and link.open and self._has_room(link, ask.n)]
            if ready:
                return min(ready, key=lambda link: link.tokens)
            await self._wait_for_change()
        return None

    def _has_room(self, link: Link, n: int) -> bool:
        return link.completions == 0 or link.completions + n <= self._settings.max_batch

    async def attempt(self, link: Link, ask: Ask, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, which asks the server; None if the request was taken back."""
        tokens = len(ask.context) + ask.n * ask.max_tokens
        task = asyncio.create_task(work)
        link.attempts.add(task)
        link.completions += ask.n
        link.tokens += tokens
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            link.attempts.discard(task)
            link.completions -= ask.n
            link.tokens -= tokens
            self._signal()
        return None if task.cancelled() else task.result()

    # Servers come and go ---------------------------------------------------------------------------------------------

    async def _supervise(self, server: VLLMServer) -> None:
        """The server is running whenever it can be."""
        server.start()
        await server.ready()
        self._none_live_since = time.monotonic()
        self._signal()
        await server.keep_running()

    async def _watched(self, tend: Callable[[T], Coroutine[Any, Any, None]], what: T) -> None:
        """What goes wrong in it ends the run: nobody awaits it, and whoever waits for a server would wait for ever."""
        try:
            await tend(what)
        except Exception as error:
            self._failure = error
            self._signal()

    async def _tend(self, link: Link) -> None:
        """Bring the server back whenever it is away, and see whether it still answers while it is live."""
        missed = 0
        while True:
            if not link.live:
                missed = 0
                await self._bring_back(link)
                if not link.live:
                    link.losses += 1
            if link.live:
                await wait(link.lost, HEALTH_EVERY_S)
            if not link.live:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(link.losses, 10)))
            elif not link.updating.locked():
                missed = 0 if await link.healthy() else missed + 1
                if missed == MISSED_HEALTH:
                    self.lose(link, f"/health failed {missed} times in a row")
                    self._take_back(link)

    async def _bring_back(self, link: Link) -> None:
        """The server is live if it answers, once it holds the newest weights."""
        async with link.updating:
            try:
                await link.connect(self._model_name)
                link.examined = False
                await self._catch_up(link)
            except ServerLost as lost:
                link.trouble = str(lost)
                return
            if link.lost.is_set():
                self._say(f"The server {link.url} is back, with the weights of version {link.version}.")
            link.live = True
            link.lost.clear()
            self._signal()

    def lose(self, link: Link, why: str) -> None:
        link.trouble = why
        if not link.live:
            return
        link.live = False
        link.losses += 1
        link.lost.set()
        if not any(other.live for other in self.links):
            self._none_live_since = time.monotonic()
        self._say(f"The server {link.url} is left out until it is well again: {why}.")
        self._signal()

    def _take_back(self, link: Link) -> None:
        """Its requests go elsewhere. vLLM drops what it runs for a connection that is closed."""
        for task in link.attempts:
            task.cancel()

    def _signal(self) -> None:
        """Wake everyone who waits for a change of the servers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Raises EngineError if no server was live for `engine.patience_s`."""
        left = None
        if not any(link.live for link in self.links):
            left = self._none_live_since + self._settings.patience_s - time.monotonic()
            if left <= 0:
                raise self.out_of_patience("no server answers")
        await wait(self._changed, left)

    async def _wait_for_live(self) -> None:
        while not self.closing.is_set() and not any(link.live for link in self.links):
            if self._failure is not None:
                raise self._failure
            await self._wait_for_change()

    def out_of_patience(self, what: str) -> EngineError:
        troubles = "; ".join(f"{link.url}: {link.trouble}" for link in self.links)
        log = f" Its output is in {self._server.log}." if self._server is not None else ""
        return EngineError(
            f"engine.patience_s is {self._settings.patience_s:g}, but for longer than that {what} ({troubles}). Nothing "
            f"can be sampled.{log} Start the servers again and resume the run, or raise engine.patience_s."
        )

    # Weights ---------------------------------------------------------------------------------------------------------

    async def load(self, weights: Weights, version: int) -> None:
        """Every live server holds `weights`; one that is away gets them before it is live again. Raises EngineError."""
        if self._push_weights is None:
            raise EngineError(
                f"engine.urls is {[link.url for link in self.links]}, but there is no way to push weights to them. They "
                "would serve old weights for ever. Give the engine a WeightPush."
            )
        self._loads += 1
        newest = newest_of(weights, version, f"{self._run}/{self._loads}/{version}")
        self.newest = replace(newest, rows=await self._push_weights.prepare(newest.weights, version))
        if self._loads == 1:
            await self._wait_for_live()
        updates = [self._update(link) for link in self.links if link.live]
        for error in await asyncio.gather(*updates, return_exceptions=True):
            if error is not None:
                raise error

    async def _catch_up(self, link: Link) -> None:
        """The server holds the newest weights, whatever it was started with or has missed."""
        newest = None
        while newest is not self.newest:  # newer ones may come during a push
            newest = self.newest
            if newest is None:
                continue
            if await link.weights_name() != newest.name:
                await self._push(link, newest)
            link.version = newest.version  # also where it holds them already, and the answer to the push got lost
            await self._examine(link, newest)

    async def holds_ours(self, link: Link) -> bool:
        return (await link.weights_name() or "").startswith(self._run)

    async def _update(self, link: Link) -> None:
        """The server holds the newest weights, or is away."""
        async with link.updating:
            link.open = False
            try:
                if link.goes_on and self._settings.on_new_weights == "continue":
                    link.settled.clear()
                else:
                    await self._quiet(link)
                if link.live and self.newest is not None and link.holds != self.newest.name:
                    await self._push(link, self.newest)
                    await self._examine(link, self.newest)
            except ServerLost as lost:
                self.lose(link, str(lost))
            except EngineError as error:
                self.lose(link, str(error))
                raise
            finally:
                link.open = True
                link.settled.set()
                self._signal()

    async def _quiet(self, link: Link) -> None:
        """The server runs nothing of ours: it is finished, cut off with its tokens, or taken back without."""
        if self._settings.on_new_weights == "drain":
            while link.attempts:
                await asyncio.wait(link.attempts)
            return
        until = time.monotonic() + ABORT_FOR_S
        while link.attempts:
            try:
                able = await link.abort_all()
            except ServerLost as lost:
                self.lose(link, str(lost))
                able = False
            if not able or time.monotonic() > until:
                self._take_back(link)
            if link.attempts:
                await asyncio.wait(link.attempts, timeout=ABORT_EVERY_S)

    async def _push(self, link: Link, newest: Newest) -> None:
        """Raises ServerLost if the server is not well, EngineError if it is and the push fails twice."""
        push = self._push_weights
        assert push is not None
        link.named[newest.name] = newest.version
        for last in (False, True):
            try:
                async with asyncio.timeout(self._settings.request_timeout_s):
                    link.adapter = await push.push(link.url, newest.weights, newest.version, newest.name)
                await link.name_weights(newest.name)
                link.version = newest.version
                return
            except (EngineError, OSError) as error:  # TimeoutError is an OSError
                self._take_back(link)  # what ran meanwhile may have drawn from anything
                trouble = str(error) or type(error).__name__
                if not await link.healthy():
                    raise ServerLost(f"the push of version {newest.version} failed ({trouble})") from error
                if last:
                    raise EngineError(
                        f"The server {link.url} is well, but the push of the weights of version {newest.version} failed "
                        f"twice ({trouble}). What it would sample from is unknown. Mend that, and resume the run."
                    ) from error

    async def _examine(self, link: Link, newest: Newest) -> None:
        """It is known which logprobs the server reports, before it serves. Raises ServerLost, EngineError."""
        if link.examined or newest.rows is None:
            return
        link.raw = await reports_raw(link, newest.rows)
        link.examined = True
        if link.raw:
            self._say(raw_notice(link.url, self._settings.raw_logprobs))


async def wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event is set or the time is over. (`wait_for` of Python 3.11 may swallow a cancellation.)"""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
