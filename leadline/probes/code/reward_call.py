"""A reward function of any trainer, called with texts: which parameter takes what, and one number a completion back."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from leadline.errors import ConfigError, RewardError
from leadline.probes.code.binding import given_arguments
from leadline.rewards.values import batch_values, single_value

ONE = {
    "completion": "completion solution_str response text output generation content prediction pred predict_str",
    "prompt": "prompt question query input problem instruction",
    "gold": "answer ground_truth solution target label reference gold expected correct_answer gt",
    "finish_reason": "finish_reason",
}
MANY = {
    "completion": "completions responses outputs texts solution_strs generations predictions",
    "prompt": "prompts questions inputs",
    "query": "queries",
    "gold": "answers ground_truths solutions targets labels references golds",
}
EXTRA = {"data_source": "openai/gsm8k", "extra_info": None}
"""verl's own words, which most functions do not look at."""

TIMEOUT_S = 10.0


class TooSlow(Exception):
    """No result within the time limit."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with its right answer, and further columns of the dataset row."""

    prompt: str
    gold: str
    columns: Mapping[str, Any]


class Scores(Protocol):
    """What is asked of a reward function by the canaries."""

    @property
    def batched(self) -> bool: ...

    def scores(self, task: Task, texts: Sequence[str], timeout_s: float = ...) -> list[float | None]: ...


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function whose parameters are understood.

    Example:
        understood(accuracy, []).scores(task, ["5", "6"])
    """

    function: Callable[..., Any]
    meanings: Mapping[str, tuple[str, bool]]
    """Parameter -> (what it takes, whether it takes a list of them)."""
    fixed: Mapping[str, Any]
    takes_all: bool
    batched: bool
    chat: bool = False
    """Completions are lists of messages."""

    @property
    def words(self) -> str:
        """How it is called, for the report."""
        parts = [f"{name} = {meaning}" + "s" * many for name, (meaning, many) in self.meanings.items()]
        parts += [f"{name} = {value!r}" for name, value in self.fixed.items()]
        return ", ".join([*parts, *["**kwargs = the columns of the row"] * self.takes_all])

    def scores(self, task: Task, texts: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[float | None]:
        """One reward a text; None = no reward.

        Raises what the function raises, RewardError for a return value of another shape, TooSlow.
        """
        if self.batched:
            return batch_values("the function", _plain(self.timed(self.arguments(task, texts), timeout_s)), len(texts))
        return [single_value("the function", _plain(self.timed(self.arguments(task, [t]), timeout_s))) for t in texts]

    def raw(self, task: Task, texts: Sequence[str]) -> Any:
        """What the function returns, untouched."""
        return self.timed(self.arguments(task, texts), TIMEOUT_S)

    def arguments(self, task: Task, texts: Sequence[str]) -> dict[str, Any]:
        """By parameter."""
        values: dict[str, list[Any]] = {
            "completion": [[{"role": "assistant", "content": t}] if self.chat else t for t in texts],
            "prompt": [[{"role": "user", "content": task.prompt}] if self.chat else task.prompt for _ in texts],
            "query": [task.prompt + text for text in texts],
            "gold": [task.gold for _ in texts],
            "finish_reason": ["eos" for _ in texts],
        }
        arguments = {n: values[meaning] if many else values[meaning][0] for n, (meaning, many) in self.meanings.items()}
        arguments |= self.fixed
        if self.takes_all:
            columns = {name: [value] * len(texts) if self.batched else value for name, value in task.columns.items()}
            arguments = columns | arguments
        return arguments

    def timed(self, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """The result of one call in a thread, as trainers make it; one that hangs is left behind. Raises TooSlow."""
        box: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                result = self.function(**arguments)
                box.append((asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result, None))
            except BaseException as error:  # SystemExit, too: the user's code runs here
                box.append((None, error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not box:
            raise TooSlow(f"no result within {timeout_s:g} s")
        result, error = box[0]
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        return result


def understood(function: Callable[..., Any], given: Sequence[str], columns: Mapping[str, Any]) -> RewardCall:
    """The function with its parameters understood. Raises ConfigError: a parameter that means nothing known."""
    own = given_arguments(given)
    meanings: dict[str, tuple[str, bool]] = {}
    fixed: dict[str, Any] = {}
    signature = inspect.signature(function)
    many_texts = any(name in MANY["completion"].split() + MANY["query"].split() for name in signature.parameters)
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.name in own:
            _, value = own[p.name]
            fixed[p.name] = [value] if many_texts and not isinstance(value, list) else value
        elif meaning := _meaning(p.name, many_texts):
            meanings[p.name] = meaning
        elif p.name in columns:
            fixed[p.name] = columns[p.name]
        elif p.name in EXTRA:
            fixed[p.name] = EXTRA[p.name]
        elif p.default is p.empty:
            raise ConfigError(
                f"The function takes {p.name}, but nothing of that name is known for --as reward. It could not be "
                f"called. Give its value: --arg {p.name}=VALUE, or --samples FILE with a column of that name."
            )
    if not {"completion", "query"} & {meaning for meaning, _ in meanings.values()}:
        raise ConfigError(
            "--as is reward, but no parameter of the function is known to be the completion. It could not be scored. "
            f"Name it one of {', '.join(ONE['completion'].split())} (or completions, responses ...)."
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return RewardCall(function, meanings, fixed, takes_all, many_texts)


def answer_timed(call: "Scores", task: Task, text: str) -> tuple[list[float | None], float]:
    """The scores and the seconds they took."""
    started = time.perf_counter()
    return call.scores(task, [text]), time.perf_counter() - started


def _meaning(name: str, many_texts: bool) -> tuple[str, bool] | None:
    for table, many in ((MANY, True), (ONE, many_texts)):
        for meaning, spelled in table.items():
            if name in spelled.split():
                return meaning, many
    return None


def _plain(returned: Any) -> Any:
    """verl and OpenRLHF may return a dict around the score."""
    if isinstance(returned, Mapping):
        for key in ("score", "rewards", "reward", "scores"):
            if key in returned:
                return returned[key]
        raise RewardError(
            f"The function returned a dict with the keys {', '.join(map(str, returned))}, but none of them is score or "
            "reward. Nothing could be learned from it. Return one number a completion."
        )
    return returned


async def _awaited(result: Any) -> Any:
    return await result
