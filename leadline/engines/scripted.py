"""An engine that replays a script: for tests of the loop, and for `--dry-run`."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt, Weights

Script = Callable[[Prompt, int], Sequence[Completion]]


class ScriptedEngine:
    """Completions come from a script; each token carries the version that was loaded when `generate` was called.

    The script is a function of (prompt, n), a mapping from `prompt.index`, or a sequence that is read at
    `prompt.index` modulo its length. `delay(prompt)` is the number of seconds that a call takes.

    Example:
        ScriptedEngine(echo_script(vocab_size=260, eos_ids={3}, max_tokens=16), delay=lambda prompt: 0.01)
    """

    def __init__(
        self,
        script: Script | Mapping[int, Sequence[Completion]] | Sequence[Sequence[Completion]],
        delay: Callable[[Prompt], float] | None = None,
    ) -> None:
        self._script = script
        self._delay = delay or (lambda prompt: 0.0)
        self._closed = asyncio.Event()
        self.version = 0
        self.loaded: list[int] = []
        """Every version that was loaded, in order."""

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        """The script's completions of the prompt; empty and aborted if the engine is closed meanwhile.

        Raises EngineError if the script has not `n` completions for it, or the engine was closed before.
        """
        if self._closed.is_set():
            raise EngineError(f"Prompt {prompt.index} was sent to the engine, but it is closed. Start a new engine.")
        version, completions = self.version, self._completions(prompt, n)
        if await self._closes_within(self._delay(prompt)):
            return [Completion((), (), (), FinishReason.ABORT)] * n
        return [replace(c, policy_versions=(version,) * len(c.token_ids)) for c in completions]

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Later calls of `generate` stamp `version`."""
        self.version = version
        self.loaded.append(version)

    async def close(self) -> None:
        """Running calls return at once, aborted."""
        self._closed.set()

    async def _closes_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _completions(self, prompt: Prompt, n: int) -> Sequence[Completion]:
        match self._script:
            case Mapping():
                found = self._script.get(prompt.index, ())
            case Sequence():
                found = self._script[prompt.index % len(self._script)]
            case script:
                found = script(prompt, n)
        if len(found) != n:
            raise EngineError(
                f"The script has {len(found)} completions for prompt {prompt.index}, but {n} were asked for. The "
                "group would be incomplete. Write as many completions as rollout.group_size."
            )
        return found


def echo_script(vocab_size: int, eos_ids: Collection[int], max_tokens: int, seed: int = 0) -> Script:
    """A script of random completions, the same for the same prompt: uniform tokens, mean length about half the limit.

    The logprobs are those of the distribution that the tokens are really drawn from: EOS with probability
    q = 1 / (1 + limit / 2), else one of the other V ids, each with (1 - q) / V.
    """
    others = np.array([i for i in range(vocab_size) if i not in eos_ids])
    eos = min(eos_ids) if eos_ids else None
    q = 0.0 if eos is None else 1 / (1 + max_tokens / 2)

    def completion(rng: np.random.Generator) -> Completion:
        ends = np.flatnonzero(rng.random(max_tokens) < q)
        length = int(ends[0]) if len(ends) else max_tokens
        ids = [int(i) for i in rng.choice(others, length)]
        logprobs = [math.log((1 - q) / len(others))] * length
        if len(ends) and eos is not None:
            ids, logprobs = [*ids, eos], [*logprobs, math.log(q)]
        reason = FinishReason.EOS if len(ends) else FinishReason.LENGTH
        return Completion(tuple(ids), tuple(logprobs), (0,) * len(ids), reason)

    def script(prompt: Prompt, n: int) -> Sequence[Completion]:
        rng = np.random.default_rng([seed, abs(prompt.index), prompt.index < 0])
        return [completion(rng) for _ in range(n)]

    return script
