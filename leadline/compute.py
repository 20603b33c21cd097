"""The one thread that multiplies.

OpenMP gives each thread that begins a parallel region a team of its own. With a second team there are more threads than
cores, and GNU's runtime then puts idle ones to sleep at once instead of letting them wait for the next operation: on two
cores a decode step took 78 ms instead of 51. So whatever multiplies goes through here: loading, sampling, updates.

A run whose engine samples while the policy trains has two such threads, for it is meant to.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREAD = ThreadPoolExecutor(1, thread_name_prefix="leadline-compute")


def computes(work: Callable[P, T]) -> Callable[P, T]:
    """`work`, run on the compute thread whoever calls it; the caller waits."""

    @wraps(work)
    def on_thread(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread().name.startswith("leadline-compute"):
            return work(*args, **kwargs)
        return THREAD.submit(work, *args, **kwargs).result()

    return on_thread


async def computed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, computed on the compute thread while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(THREAD, partial(work, *args, **kwargs))
