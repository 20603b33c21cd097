"""One reward function with its weight: which arguments it takes, how it is called, what came of it."""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leadline.errors import ConfigError
from leadline.rewards.resolve import function_name
from leadline.rewards.values import batch_values, single_value
from leadline.types import Completion, Prompt

GIVEN = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids", "finish_reason"})
"""What we hand to a function that asks by name. A dataset column of one of these names is hidden by it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result."""

    error: str


Outcome = float | Failure | None
"""Of one component for one completion; None = no reward."""


@dataclass(frozen=True, slots=True)
class Component:
    """A reward function, ready to be called.

    Example:
        component(exact_match, weight=0.7, params={"casefold": True})
    """

    label: str
    weight: float
    function: partial[Any]
    """With `params` bound to it."""
    batched: bool
    timeout_s: float
    accepts: frozenset[str]
    requires: frozenset[str]
    """Dataset columns without which it cannot be called."""
    takes_all: bool
    """It has **kwargs: it gets every column."""
    is_async: bool
    """It runs in the event loop, else in a thread."""

    async def returned(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str], threads: asyncio.Semaphore
    ) -> list[Any]:
        """What the call for each completion returned, or the one call for all; a Failure where it raised or timed out."""
        arguments = (
            self._batch(prompt, completions, texts) if self.batched else self._singles(prompt, completions, texts)
        )
        return await asyncio.gather(*(self._call(kwargs, threads) for kwargs in arguments))

    def outcomes(self, returned: Sequence[Any], count: int) -> list[Outcome]:
        """One value per completion. Raises RewardError: the function returned something else."""
        if not self.batched:
            return [r if isinstance(r, Failure) else single_value(self.label, r) for r in returned]
        (result,) = returned
        return [result] * count if isinstance(result, Failure) else [*batch_values(self.label, result, count)]

    async def _call(self, kwargs: dict[str, Any], threads: asyncio.Semaphore) -> Any:
        call = partial(self.function, **kwargs)
        if self.is_async:
            return await self._timed(call)
        async with threads:  # waiting for a free thread does not count
            return await self._timed(partial(_in_thread, call))

    async def _timed(self, call: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                result = await call()
                return await result if inspect.isawaitable(result) else result
        except Exception as error:
            if limit.expired():
                return Failure(f"{self.label}: timeout, no result within {self.timeout_s:g} s")
            return Failure(f"{self.label}: {type(error).__name__}: {error}")

    def _singles(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[dict[str, Any]]:
        return [
            self._chosen(prompt.columns, prompt.text, text, list(c.token_ids), str(c.finish_reason))
            for c, text in zip(completions, texts, strict=True)
        ]

    def _batch(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[dict[str, Any]]:
        n = len(completions)
        columns = {name: [value] * n for name, value in prompt.columns.items()}
        ids, reasons = [list(c.token_ids) for c in completions], [str(c.finish_reason) for c in completions]
        return [self._chosen(columns, [prompt.text] * n, list(texts), ids, reasons)]

    def _chosen(
        self, columns: Mapping[str, Any], prompt: Any, completion: Any, completion_ids: Any, finish_reason: Any
    ) -> dict[str, Any]:
        """The arguments that the function accepts and that are not bound. Both spellings of prompt and completion are
        offered; **kwargs gets the fitting one."""
        given = {"completion_ids": completion_ids, "finish_reason": finish_reason}
        one, many = {"prompt": prompt, "completion": completion}, {"prompts": prompt, "completions": completion}
        offered = {**columns, **one, **many, **given}
        if not self.takes_all:
            return {name: value for name, value in offered.items() if name in self.accepts}
        unfit = (one if self.batched else many).keys() - self.accepts | self.function.keywords.keys()
        return {name: value for name, value in offered.items() if name not in unfit}


def component(
    function: Callable[..., Any],
    *,
    label: str | None = None,
    weight: float = 1.0,
    params: Mapping[str, Any] | None = None,
    batched: bool | None = None,
    timeout_s: float = 30.0,
) -> Component:
    """The function with `params` bound. Raises ConfigError: it takes no such parameter, or unnamed ones only."""
    label = label or function_name(function)
    bound = partial(function, **(params or {}))  # a partial of a partial holds the keywords of both
    parameters = checked_parameters(function, label, params or {})
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    names = named - bound.keywords.keys()
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty}
    return Component(
        label=label,
        weight=weight,
        function=bound,
        batched=bool(names & {"prompts", "completions"}) if batched is None else batched,
        timeout_s=timeout_s,
        accepts=frozenset(names),
        requires=frozenset(needed - GIVEN),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),  # noqa: B004
    )


def checked_parameters(function: Callable[..., Any], label: str, params: Mapping[str, Any]) -> list[inspect.Parameter]:
    """The parameters of the function, which takes `params`. Raises ConfigError."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial(**params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"rewards.params of {label!r} is {dict(params)}, but the function does not take it: {error}. It could not "
            "be called. Use its parameter names."
        ) from error
    parameters = list(signature.parameters.values())
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(
            f"The reward {label!r} has positional-only parameters, but arguments are passed by name. It could not be "
            "called. Remove the '/' from its signature."
        )
    return parameters


async def _in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns in a daemon thread of its own.

    A thread cannot be killed. One that hangs is left behind: it keeps its memory and, if it computes, its share of
    the interpreter, but it blocks neither later calls nor the end of the process, as a pool's would.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = context.run(call), None
        except BaseException as error:  # SystemExit too: user code must not end the run
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, daemon=True, name="leadline-reward").start()
    result, error = await done
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    return result
