"""Tasks that end as a run needs it: an error comes out as itself, and what must be whole is not cut in two."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from leadline.errors import LeadlineError

T = TypeVar("T")


class PlainTaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises the first error as itself, one of ours if there is one: users read no exception groups."""

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            return await super().__aexit__(*exc_info)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            error = _first(group.subgroup(LeadlineError) or group)
        raise error  # not in the handler: the group would be shown as its context


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. An error elsewhere stops the run after it, never half-way through an update or a file."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
