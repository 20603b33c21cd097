"""How far the engine may run ahead of the policy.

At most `(max_staleness + 1) * groups_per_step` groups are held (started and not yet released), and a slot is freed
only once the weights its group trained are live in the engine. So when a group starts, at most
`max_staleness * groups_per_step + groups_per_step - 1` others are held, all of them are trained before it, and the
policy can move by at most `max_staleness` steps until it is its turn: the bound is an admission rule, nothing stale
is ever sampled and thrown away. With `max_staleness = 0` this is a synchronous loop. (The same formula as AReaL's and
TorchTitan's.)
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from leadline.errors import StalenessError
from leadline.loop.activity import Activity
from leadline.types import Group, Prompt


class PromptSource(Protocol):
    """An endless stream of prompts that knows how many it gave away."""

    def __next__(self) -> Prompt: ...

    @property
    def position(self) -> int: ...


class RolloutQueue:
    """Started groups, first in first out: in the order of starting, so that slow groups are never overtaken.

    `ahead` are prompts that an earlier part of the run has trained out of their turn: they are passed over.
    """

    def __init__(
        self,
        rollout: Callable[[Prompt], Coroutine[Any, Any, Group]],
        prompts: PromptSource,
        *,
        groups_per_step: int,
        max_staleness: int,
        ahead: Collection[int] = (),
        activity: Activity | None = None,
    ) -> None:
        self._rollout = rollout
        self._prompts = prompts
        self._ahead = set(ahead)
        self._activity = activity or Activity()
        self._slots = asyncio.Semaphore((max_staleness + 1) * groups_per_step)
        self._started: deque[tuple[Prompt, asyncio.Task[Group]]] = deque()
        self._news = asyncio.Event()

    @property
    def position(self) -> int:
        """Stream position of the first prompt that has not been handed to training: where a resumed run goes on."""
        return self._started[0][0].index if self._started else self._prompts.position

    @property
    def ahead(self) -> tuple[int, ...]:
        """Prompts beyond the position that have been handed to training, by refills."""
        return tuple(sorted(index for index in self._ahead if index >= self.position))

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        """Start a group whenever one may start. Runs until cancelled."""
        while True:
            await self._slots.acquire()
            prompt = self._next_prompt()
            self._started.append((prompt, tasks.create_task(self._rollout(prompt))))
            self._news.set()

    async def take(self, count: int) -> list[Group]:
        """The `count` oldest groups, once they are done."""
        groups: list[Group] = []
        while len(groups) < count:
            while not self._started:
                self._news.clear()
                await self._news.wait()
            prompt, task = self._started[0]
            with self._activity.trainer(f"waits for the group of prompt {prompt.index}"):
                groups.append(await task)
            self._started.popleft()
        return groups

    async def refill(self, count: int) -> list[Group]:
        """`count` further groups, started now with the newest weights and outside the slots."""
        with self._activity.trainer(f"waits for {count} further groups"):
            groups = await asyncio.gather(*(self._rollout(self._next_prompt()) for _ in range(count)))
        self._ahead = {*self.ahead, *(group.prompt.index for group in groups)}
        return list(groups)

    def release(self, count: int) -> None:
        """The weights that `count` taken groups trained are live in the engine: as many new ones may start."""
        for _ in range(count):
            self._slots.release()

    def cancel(self) -> None:
        """Stop the groups that are under way."""
        for _, task in self._started:
            task.cancel()

    def _next_prompt(self) -> Prompt:
        while (prompt := next(self._prompts)).index in self._ahead:
            pass
        return prompt


def check_staleness(
    groups: Sequence[Group], policy_version: int, max_staleness: int, replay_max_staleness: int = 0
) -> None:
    """Raise StalenessError if a token is older than its bound (queue and buffer make that impossible; this is the proof)."""
    for group in groups:
        name, bound = "max_staleness", max_staleness
        if group.replayed:
            name, bound = "replay_max_staleness", replay_max_staleness
        if group.policy_version is not None and policy_version - group.policy_version > bound:
            raise StalenessError(
                f"rollout.{name} is {bound}, but prompt {group.prompt.index} has tokens of version "
                f"{group.policy_version} at version {policy_version}. They would train off policy beyond the bound. "
                "Report this as a bug of the rollout queue."
            )
