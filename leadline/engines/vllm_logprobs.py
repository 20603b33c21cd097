"""Whether a server's logprobs are those of the distribution that it samples, and what to do if they are not.

vLLM reports raw logprobs (of the model's own logits) unless it is started with `--logprobs-mode processed_logprobs`.
The difference is no noise: at temperature 0.6 it is 0.4 nats a token, and importance weights made of it are worthless.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from leadline.engines.vllm_link import Link
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBE_TOP, PROBES, probe_ids
from leadline.engines.vllm_wire import Ask, MalformedAnswer, logprob, read_choices, read_completions
from leadline.errors import EngineError
from leadline.objective.logprobs import token_logprobs
from leadline.objective.sampling import processed_logits
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt

PROBE_TEMPERATURE = 2.0
"""Hot, so that the distributions before and after it differ on almost every token."""
OTHER_TEMPERATURES = (0.25, 0.5, 0.75, 1.5, 3.0, 4.0)
LARGEST_GAP = 0.25
"""Mean distance in nats of the same distribution in other precision: 0.03 to 0.11 in bfloat16 (mixtures of experts)."""
CLEARLY = 0.05
"""Nats by which another temperature must fit better: where all fit alike, nothing can be told and nothing matters."""


async def reports_raw(link: Link, rows: Float[Tensor, "probe vocab"]) -> bool:
    """Whether the server's logprobs are those before temperature, found out on a few tokens drawn hot.

    The server must hold the weights by which the policy gave `rows`, its logprobs behind the probe prompts. Nothing else of
    the policy is needed: a server may come back while it is being trained. Where both distributions agree on these tokens,
    it does not matter. Raises ServerLost, and EngineError if the logprobs are missing or those of neither.
    """
    asks = [_probe(i, rows.shape[1]) for i in range(PROBES)]
    bodies = await asyncio.gather(*(link.complete(ask) for ask in asks))
    try:
        told = [_reported(body, ask) for body, ask in zip(bodies, asks, strict=True)]
    except MalformedAnswer as bad:
        raise EngineError(
            f"The server {link.url} was asked for {PROBES} tokens, but {bad}. Nothing can be sampled from it. Check that "
            "the address is vLLM's own, with no proxy that cuts or changes answers."
        ) from bad
    gaps = {t: _gap(told, (rows / t).log_softmax(-1)) for t in (PROBE_TEMPERATURE, 1.0, *OTHER_TEMPERATURES)}
    _check_gaps(link.url, gaps)
    return gaps[1.0] < gaps[PROBE_TEMPERATURE]


def raw_notice(url: str, raw_logprobs: str) -> str:
    """What a person should know of a server that reports raw logprobs."""
    return (
        f"The server {url} reports raw logprobs, from before temperature and truncation. They are right only at "
        "temperature 1 without top_p, top_k, min_p and repetition penalty; else engine.raw_logprobs "
        f"({raw_logprobs!r}) decides."
    )


def _probe(i: int, vocab_size: int) -> Ask:
    prompt = Prompt(index=i, text="", token_ids=tuple(probe_ids(vocab_size)[: PROBE_PROMPT + i]))
    sampling = Sampling(max_tokens=1, temperature=PROBE_TEMPERATURE)
    return Ask(prompt, 1, sampling, frozenset(), vocab_size, run_seed=0, top_logprobs=PROBE_TOP)


def _reported(body: bytes, ask: Ask) -> list[tuple[int, float]]:
    """Token and logprob: of the token that was drawn, and of the most probable ones."""
    [completion] = read_completions(body, ask, version=0)
    [choice] = read_choices(body, 1)
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
    known = [(int(name.removeprefix("token_id:")), logprob(value)) for name, value in tops[0].items()]
    return [*zip(completion.token_ids, completion.logprobs, strict=True), *known]


def _gap(told: Sequence[Sequence[tuple[int, float]]], expected: Float[Tensor, "probe vocab"]) -> float:
    """Mean distance in nats of the reported logprobs from the expected ones; NaN if one is missing."""
    gaps = [abs(value - float(row[token])) for row, pairs in zip(expected, told, strict=True) for token, value in pairs]
    return sum(gaps) / len(gaps) if gaps else math.nan


def _check_gaps(url: str, gaps: Mapping[float, float]) -> None:
    """Raise EngineError unless the logprobs are those of the policy, at the temperature asked for or raw."""
    right = min(gaps[PROBE_TEMPERATURE], gaps[1.0])
    nearest = min(gaps, key=lambda temperature: gaps[temperature])
    if not gaps[nearest] <= LARGEST_GAP:
        raise EngineError(
            f"The server {url} reports logprobs that differ from the policy's by {gaps[PROBE_TEMPERATURE]:.3g} nats a "
            f"token ({gaps[1.0]:.3g} if they were raw), but it was pushed the policy's weights. It serves another model, "
            "or does not report the tokens' logprobs. Start it with the recipe's model.name."
        )
    if right - gaps[nearest] > CLEARLY:
        raise EngineError(
            f"The server {url} was asked for temperature {PROBE_TEMPERATURE}, but reports logprobs as of temperature "
            f"{nearest}. Importance weights would be off by a power. Find out what changes the temperature on the way."
        )


# Conversion -----------------------------------------------------------------------------------------------------------


def is_plain(sampling: Sampling) -> bool:
    """Whether raw and processed logprobs are the same numbers: the model's own distribution is sampled (or greedily)."""
    unchanged = sampling.temperature in (0.0, 1.0) and sampling.repetition_penalty == 1
    return unchanged and sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0


def tops_needed(url: str, ask: Ask, raw_logprobs: Literal["refuse", "convert"]) -> int:
    """How many of the most probable tokens must be known to convert raw logprobs. Raises EngineError if none suffice."""
    if raw_logprobs == "refuse":
        raise EngineError(
            f"engine.raw_logprobs is 'refuse', but the server {url} reports raw logprobs, and sampling is not plain "
            f"(temperature {ask.sampling.temperature}). They are not those of the tokens' distribution. Start the server "
            "with --logprobs-mode processed_logprobs."
        )
    if ask.sampling.repetition_penalty != 1:
        raise EngineError(
            f"sampling.repetition_penalty is {ask.sampling.repetition_penalty}, but the server {url} reports raw logprobs, "
            "and the penalty depends on the logits' zero, which these have lost. No conversion is exact. Start the "
            "server with --logprobs-mode processed_logprobs."
        )
    return min(ask.sampling.top_k or ask.vocab_size, ask.vocab_size)


def converted_completions(body: bytes, ask: Ask, completions: Sequence[Completion]) -> list[Completion]:
    """The completions with the logprobs of the distribution that was sampled, from the raw ones of the likely tokens.

    Raw logprobs are logits up to a constant, which temperature, top_k, top_p, min_p and the softmax do not see:
    exact if all tokens are known that can be drawn. NaN where one is missing.
    """
    choices = read_choices(body, ask.n)
    return [
        replace(completion, logprobs=_converted(choice, completion, ask))
        for choice, completion in zip(choices, completions, strict=True)
    ]


def _converted(choice: Mapping[str, Any], completion: Completion, ask: Ask) -> tuple[float, ...]:
    logprobs = choice.get("logprobs")
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(tops, list) or len(tops) != len(completion.token_ids):
        return (torch.nan,) * len(completion.token_ids)
    return tuple(_converted_token(top, token, ask) for top, token in zip(tops, completion.token_ids, strict=True))


def _converted_token(top: Any, token: int, ask: Ask) -> float:
    name = f"token_id:{token}"
    if not isinstance(top, Mapping) or name not in top or len(top) < ask.top_logprobs:
        return torch.nan
    known = [name, *(other for other in top if other != name)]
    logits = torch.tensor([[logprob(top[other]) for other in known]])
    if bool(logits[0, 0].isnan()):
        return torch.nan
    sampling = ask.sampling
    logits = processed_logits(
        logits.nan_to_num(-torch.inf),  # vLLM's stand-in for -inf
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=1.0,
        keep=torch.tensor([0]),
    )
    return float(token_logprobs(logits, torch.tensor([0]))[0])
