"""The engine that samples from vLLM servers over HTTP: one request per group, and what is retried."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from leadline.engines.base import WeightPush
from leadline.engines.vllm_link import Busy, Link, ServerLost
from leadline.engines.vllm_logprobs import converted_completions, is_plain, tops_needed
from leadline.engines.vllm_pool import Pool, wait
from leadline.engines.vllm_server import VLLMServer
from leadline.engines.vllm_spans import ForeignWeights
from leadline.engines.vllm_wire import Ask, MalformedAnswer, joined, read_completions
from leadline.errors import EngineError
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, FinishReason, Prompt, Weights

TRIES = 3
"""Answers that cannot be read, and continuations without a token, before a request is given up."""


class VLLMEngine:
    """Completions from any number of vLLM servers, token ids in and token ids out.

    One request a group; it goes to the live server with the fewest tokens to draw. The draws depend on `seed`,
    `prompt.index` and the place in the group. Every token carries the version of the weights that drew it.

    With `engine.on_new_weights = "continue"` running completions go on with new weights: under way where the server
    tells which weights drew which tokens, elsewhere aborted with the tokens they have and asked for again from there.
    With "drain" they finish first.

    Before a server that is new, or back, serves, it is found out whether it reports logprobs of the distribution it
    samples. `server` is one that is started, kept running and stopped with the engine. `say` gets a line for whatever a
    person should know.

    Raises EngineError: no server for `engine.patience_s`, a refused request, an answer that no retry can mend, a push
    that failed on a server that is well.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model_name: str | None,
        eos_ids: frozenset[int],
        vocab_size: int,
        seed: int,
        settings: EngineSettings,
        push: WeightPush | None,
        tokenizer: Any,
        server: VLLMServer | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._pool = Pool(urls, model_name=model_name, settings=settings, push=push, server=server, say=say)
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._seed = seed
        self._settings = settings
        self._tokenizer = tokenizer

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions of the prompt, in the order of their draws."""
        self._pool.start()
        greedy = sampling.temperature == 0  # vLLM draws one only; all of them are that one
        ask = Ask(prompt, 1 if greedy else n, sampling, self._eos_ids, self._vocab_size, self._seed)
        begun = await self._answer(ask)
        completions = await asyncio.gather(*(self._finish(ask, i, completion) for i, completion in enumerate(begun)))
        return completions * n if greedy else completions

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Every live server holds `weights`; one that is away gets them before it serves again."""
        self._pool.start()
        await self._pool.load(weights, version)

    async def close(self) -> None:
        """Running completions return what they have, with the finish reason ABORT."""
        await self._pool.close()

    async def _answer(self, ask: Ask) -> list[Completion]:
        """The completions, from whichever server; ABORT without tokens if the engine is closed meanwhile."""
        pool, first_loss, losses, unreadable = self._pool, 0.0, 0, 0
        while (link := await pool.place(ask)) is not None:
            try:
                completions = await pool.attempt(link, ask, self._ask(link, ask))
                if completions is not None:
                    link.losses = 0
                    return completions
            except ServerLost as lost:
                self._pool.lose(link, str(lost))
                losses += 1
                first_loss = first_loss if losses > 1 else time.monotonic()
                if losses > 1 and time.monotonic() - first_loss > self._settings.patience_s:
                    raise pool.out_of_patience(f"prompt {ask.prompt.index} failed {losses} times") from lost
            except MalformedAnswer as bad:
                unreadable += 1
                if unreadable == TRIES:
                    raise EngineError(
                        f"The server {link.url} answered HTTP 200 {TRIES} times, but {bad}. Its completions cannot be "
                        "told apart. Check that the address is vLLM's own, with no proxy that cuts or changes answers."
                    ) from bad
                await wait(pool.closing, 0.1 * 2**unreadable)
            except Busy as busy:
                await wait(pool.closing, busy.seconds)
        return [Completion((), (), (), FinishReason.ABORT)] * ask.n

    async def _finish(self, ask: Ask, sample: int, completion: Completion) -> Completion:
        """The completion, gone on with for as long as servers cut it off and it grows."""
        barren = 0
        while completion.finish_reason is FinishReason.ABORT and not self._pool.closing.is_set() and barren < TRIES:
            newest = self._pool.newest
            [more] = await self._answer(ask.rest(sample, completion.token_ids))
            barren = 0 if more.token_ids or self._pool.newest is not newest else barren + 1
            completion = joined(completion, more, ask.sampling.stop, self._tokenizer)
        return completion

    async def _ask(self, link: Link, ask: Ask) -> list[Completion]:
        raw = link.raw and not is_plain(ask.sampling)
        if raw:
            ask = replace(ask, top_logprobs=tops_needed(link.url, ask, self._settings.raw_logprobs))
        told = link.tells_versions
        body = await link.complete(ask)
        await link.settled.wait()
        if link.names and not told and not await self._pool.holds_ours(link):
            raise ServerLost("it was restarted, or another run pushed weights: it drew from weights that are not ours")
        try:
            completions = read_completions(body, ask, link.version, link.named if told else None)
        except ForeignWeights as foreign:
            raise ServerLost(f"it was restarted, or another run pushed weights: {foreign}") from foreign
        return converted_completions(body, ask, completions) if raw else completions
