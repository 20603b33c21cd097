"""The checks in their order, what came of them, and the error that stops a run."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from leadline.compute import computed
from leadline.dry_run import Check
from leadline.engines.base import Engine
from leadline.errors import LeadlineError
from leadline.probes.preflight import sampled, text, training
from leadline.probes.preflight.parts import Parts, Undecided
from leadline.probes.preflight.rewards import rewards
from leadline.types import Group

BEFORE_ENGINE: dict[str, Callable[[Parts], str]] = {
    "tokenizer": text.tokenizer,
    "terminators": text.terminators,
    "special_tokens": text.special_tokens,
    "reasoning": text.reasoning,
    "lengths": text.lengths,
    "rewards": rewards,
    "reference": training.reference,
    "optimizer": training.optimizer,
    "memory": training.memory,
}
WITH_ENGINE: dict[str, Callable[[Parts, Sequence[Group]], str]] = {
    "weights": sampled.weights,
    "parity": sampled.parity,
    "dry_step": sampled.dry_step,
}


class Preflight:
    """What was checked of a run so far. `checks` is in order; nothing of the run is changed by looking."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.checks: list[Check] = []
        self.errors: list[LeadlineError] = []
        """Of the checks that found something wrong."""
        self.seconds = 0.0

    def before_engine(self) -> list[Check]:
        """All that needs no engine."""
        started = time.perf_counter()
        with _as_if_nothing_was_drawn(self.parts.policy.device):
            found = [self._look(name, partial(check, self.parts)) for name, check in BEFORE_ENGINE.items()]
        self.seconds += time.perf_counter() - started
        return found

    async def with_engine(self, engine: Engine) -> list[Check]:
        """All that needs tokens of the engine, which holds the policy's weights."""
        started = time.perf_counter()
        with _as_if_nothing_was_drawn(self.parts.policy.device):
            found = await computed(self._look_at, await self._draw(engine))
        self.seconds += time.perf_counter() - started
        return found

    async def _draw(self, engine: Engine) -> list[Group] | LeadlineError:
        if not WITH_ENGINE.keys() <= set(self.parts.config.run.skip_checks):
            try:
                return await sampled.draw(self.parts, engine)
            except LeadlineError as error:
                return error
        return []

    def add_error(self, name: str, error: LeadlineError) -> Check:
        """What kept a check from being made is its result."""
        self.errors.append(error)
        self.checks.append(Check(name, "wrong", str(error)))
        return self.checks[-1]

    def raise_if_wrong(self) -> None:
        """Raise what is wrong as one error, of the first's class."""
        if not self.errors:
            return
        names = ", ".join(repr(check.part) for check in self.checks if check.verdict == "wrong")
        said = "\n".join(str(error) for error in self.errors)
        raise type(self.errors[0])(
            f"{said}\nThis is what the preflight found; no step was made. If it is meant to be so, set "
            f"run.skip_checks = [{names}]."
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [{"check": c.part, "verdict": c.verdict, "note": c.note} for c in self.checks]
        return {"wrong": len(self.errors), "seconds": round(self.seconds, 3), "checks": checks}

    def _look_at(self, drawn: list[Group] | LeadlineError) -> list[Check]:
        if isinstance(drawn, LeadlineError):
            return [self.add_error("weights", drawn)]
        return [self._look(name, partial(check, self.parts, drawn)) for name, check in WITH_ENGINE.items()]

    def _look(self, name: str, check: Callable[[], str]) -> Check:
        if name in self.parts.config.run.skip_checks:
            found = Check(name, "not checked", "run.skip_checks names it")
        else:
            found = self._verdict(name, check)
        self.checks.append(found)
        return found

    def _verdict(self, name: str, check: Callable[[], str]) -> Check:
        try:
            return Check(name, "ok", check())
        except Undecided as reason:
            return Check(name, "not checked", str(reason))
        except LeadlineError as error:
            self.errors.append(error)
            return Check(name, "wrong", str(error))


@contextmanager
def _as_if_nothing_was_drawn(device: torch.device) -> Iterator[None]:
    """Global generators are afterwards as before, also if a reward has drawn from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def show_checks(checks: Sequence[Check], say: Callable[[str], None]) -> None:
    """A line each; what is wrong is said by the error that follows."""
    for check in checks:
        note = "wrong, see below" if check.verdict == "wrong" else check.note
        say(f"preflight {check.part}: {'not checked: ' if check.verdict == 'not checked' else ''}{note}")
