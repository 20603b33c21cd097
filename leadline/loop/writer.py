"""What a step leaves on disk, written behind the loop by one thread: in order, and at most one step in arrears."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """One piece of work at a time. An error of it is raised where it is next waited for, once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leadline-writer")
        self._last: Future[None] | None = None

    async def put(self, work: Callable[[], None]) -> None:
        """Begin the work once what was put before is done. Raises what that raised; then this is not begun."""
        if self._last is not None and not self._last.done():
            await asyncio.wait([asyncio.wrap_future(self._last)])
        self.finish()
        self._last = self._thread.submit(work)

    def finish(self) -> None:
        """All that was put is done. Raises what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
