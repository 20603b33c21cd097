"""What goes over the wire to a vLLM server, and the strict reading of what comes back.

Nothing here guesses. What a server may get wrong has one of four outcomes, by what is still known:

    a logprob is null, NaN, infinite, a string, positive, vLLM's stand-in -9999   NaN for that token
    no logprobs, or not as many as tokens (which one is missing is unknown)       NaN for every token of the completion
    a completion without tokens, or cut off by the server                         ABORT: it is asked to go on, or fails
    not an answer to the request at all (HTML, cut off, another n)                MalformedAnswer: asked again, thrice
    tokens from weights that this run has not pushed (by their spans)             ForeignWeights: pushed, asked again
    an answer that no retry can mend (another vocabulary, another end, a 4xx)     EngineError
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leadline.engines.vllm_spans import as_completions_choice, versions_by_spans
from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt

SHOWN = 300
"""Characters of a server's answer that an error quotes."""
STAND_IN = -9999.0
"""What vLLM writes for a logprob of -inf, which no token that was drawn can have."""
ROUNDING = 1e-3
"""A logprob above 0 by no more than this is 0 but for rounding."""


class MalformedAnswer(Exception):
    """The answer cannot be read as one to the request. Asking again may help: a proxy may have cut it off."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `n` completions of a prompt, or one that goes on from the tokens drawn so far.

    Example:
        Ask(prompt, n=8, sampling=Sampling(), eos_ids=frozenset({2}), vocab_size=49152, run_seed=1)
    """

    prompt: Prompt
    n: int
    sampling: Sampling
    eos_ids: frozenset[int]
    vocab_size: int
    run_seed: int
    sample: int = 0
    """Place in the group of the first completion."""
    drawn: tuple[int, ...] = ()
    """Tokens of the completion that are known already."""
    top_logprobs: int = 0
    """Ask for the logprobs of so many most probable tokens too."""

    @property
    def context(self) -> tuple[int, ...]:
        return self.prompt.token_ids + self.drawn

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens - len(self.drawn)

    @property
    def seed(self) -> int:
        """Of this request; vLLM draws completion i with seed + i, so neighbouring prompts must lie far apart."""
        key = f"{self.run_seed}/{self.prompt.index}/{self.sample}/{len(self.drawn)}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")

    def rest(self, sample: int, drawn: tuple[int, ...]) -> "Ask":
        """The request for what one completion of this one still lacks."""
        return replace(self, n=1, sample=sample, drawn=drawn)


def request_body(ask: Ask, model: str) -> dict[str, Any]:
    """The body of POST /v1/completions. Every knob is set: the server would fill in its generation config's.

    The ends of sequence are the policy's, sent as stop tokens: the server's own list may be another.
    """
    sampling = ask.sampling
    return {
        "model": model,
        "prompt": list(ask.context),
        "n": ask.n,
        "seed": ask.seed,
        "max_tokens": ask.max_tokens,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(ask.eos_ids | set(sampling.stop_token_ids)),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": ask.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "echo": False,
        "stream": False,
    }


# What comes back ------------------------------------------------------------------------------------------------------


def read_completions(body: bytes, ask: Ask, version: int, named: Mapping[str, int] | None = None) -> list[Completion]:
    """The completions of a 200 answer in the order of their draws.

    Each token carries `version`; with `named`, the version of the weights that the server names beside it.
    Raises MalformedAnswer, ForeignWeights, and EngineError where the server serves another model or stops elsewhere.
    """
    return [_completion(choice, ask, version, named) for choice in read_choices(body, ask.n)]


def read_choices(body: bytes, n: int) -> list[Mapping[str, Any]]:
    """The `n` choices by their index, whichever route answered. Raises MalformedAnswer."""
    try:
        answer = json.loads(body)
        choices = answer["choices"]
        by_index = {choice["index"]: as_completions_choice(choice, answer) for choice in choices}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedAnswer(f"it is no answer of /v1/completions ({quoted(body)})") from error
    if len(choices) != n or by_index.keys() != set(range(n)):
        raise MalformedAnswer(f"it has the choices {[choice['index'] for choice in choices][:20]} of n = {n}")
    return [by_index[i] for i in range(n)]


def _completion(choice: Mapping[str, Any], ask: Ask, version: int, named: Mapping[str, int] | None) -> Completion:
    ids = _token_ids(choice, ask)
    _check_prompt(choice, ask)
    if not ids:
        return Completion((), (), (), FinishReason.ABORT)
    reason = _finish_reason(choice, ids, ask)
    return Completion(ids, _logprobs(choice, len(ids)), _versions(choice, len(ids), version, named), reason)


def _versions(choice: Mapping[str, Any], count: int, version: int, named: Mapping[str, int] | None) -> tuple[int, ...]:
    if named is None:
        return (version,) * count
    try:
        return versions_by_spans(choice.get("weight_versions"), count, named)
    except ValueError as error:
        raise MalformedAnswer(str(error)) from error


def _token_ids(choice: Mapping[str, Any], ask: Ask) -> tuple[int, ...]:
    if "token_ids" not in choice:
        raise EngineError(
            f"engine.urls has a server that answers without token_ids ({quoted(choice)}), but its text cannot be "
            "tokenised again without changing tokens. Nothing could be trained. Use vLLM 0.11 or newer, with no proxy "
            "that drops fields."
        )
    ids = choice["token_ids"] or []
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise MalformedAnswer(f"its token_ids are no list of integers ({quoted(ids)})")
    wrong = [i for i in ids if not 0 <= i < ask.vocab_size]
    if wrong:
        raise EngineError(
            f"engine.urls has a server that drew token {wrong[0]}, but the policy knows {ask.vocab_size} tokens. It "
            "serves another model. Start it with the recipe's model.name."
        )
    return tuple(ids)


def _check_prompt(choice: Mapping[str, Any], ask: Ask) -> None:
    seen = choice.get("prompt_token_ids")
    if seen is not None and seen != list(ask.context):
        raise EngineError(
            f"engine.urls has a server that drew from the prompt {quoted(seen)}, but prompt {ask.prompt.index} was sent "
            f"as {quoted(list(ask.context))}. The policy would score other contexts. Remove what changes prompts on "
            "the way (truncation, added special tokens)."
        )


def _finish_reason(choice: Mapping[str, Any], ids: tuple[int, ...], ask: Ask) -> FinishReason:
    """As the server says, with EOS and STOP told apart by what ended it."""
    reason = choice.get("finish_reason")
    _check_end(reason, ids, ask)
    match reason:
        case "stop" if ids[-1] in ask.eos_ids:
            return FinishReason.EOS
        case "stop":
            _check_stop(choice.get("stop_reason"), ids, ask)
            return FinishReason.STOP
        case "length":
            _check_length(ids, ask)
            return FinishReason.LENGTH
        case "abort" if ids[-1] in ask.eos_ids:  # it had ended when the abort came
            return FinishReason.EOS
        case "abort":
            return FinishReason.LENGTH if len(ids) == ask.max_tokens else FinishReason.ABORT
    raise MalformedAnswer(f"its finish_reason is {reason!r}")


def _check_end(reason: Any, ids: tuple[int, ...], ask: Ask) -> None:
    """A completion ends at the first token that ends it, and none is longer than asked for."""
    if len(ids) > ask.max_tokens:
        raise EngineError(
            f"engine.urls has a server that drew {len(ids)} tokens where max_tokens was {ask.max_tokens}. It does not "
            "heed the request. Use vLLM's own /v1/completions."
        )
    ends = ask.eos_ids | set(ask.sampling.stop_token_ids)
    passed = [token for token in (ids if reason == "length" else ids[:-1]) if token in ends]
    if passed:
        raise EngineError(
            f"engine.urls has a server that went on after token {passed[0]}, but that one ends a completion. What "
            "follows would be trained. Use a server that heeds stop_token_ids (vLLM 0.11 or newer)."
        )


def _check_stop(by: Any, ids: tuple[int, ...], ask: Ask) -> None:
    if by in ask.sampling.stop or ids[-1] in ask.sampling.stop_token_ids:
        return
    raise EngineError(
        f"engine.urls has a server that ended a completion at token {ids[-1]} (stop_reason {by!r}), but neither the "
        f"policy's EOS ids {sorted(ask.eos_ids)} nor sampling.stop hold it. It serves another model or tokenizer. "
        "Start it with the recipe's model.name."
    )


def _check_length(ids: tuple[int, ...], ask: Ask) -> None:
    if len(ids) < ask.max_tokens:
        raise EngineError(
            f"sampling.max_tokens is {ask.sampling.max_tokens}, but a server in engine.urls cut a completion of prompt "
            f"{ask.prompt.index} off after {len(ask.drawn) + len(ids)} tokens. All long completions would count as "
            "truncated. Start the server with a larger --max-model-len and --generation-config vllm, or lower "
            "sampling.max_tokens."
        )


def _logprobs(choice: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """One number per token; all NaN if they cannot be told apart, for a list too short has lost an unknown place."""
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(values, list) or len(values) != count:
        return (math.nan,) * count
    return tuple(logprob(value) for value in values)


def logprob(value: Any) -> float:
    """The number as a logprob in nats; NaN for whatever cannot be one."""
    if type(value) not in (int, float) or not STAND_IN < value <= ROUNDING:
        return math.nan
    return min(0.0, float(value))


# Going on -------------------------------------------------------------------------------------------------------------


def joined(before: Completion, after: Completion, stop: Sequence[str], tokenizer: Any) -> Completion:
    """`before` with `after` behind it. A stop string across the seam, which the server could not see, ends it."""
    ids = before.token_ids + after.token_ids
    whole = Completion(
        ids, before.logprobs + after.logprobs, before.policy_versions + after.policy_versions, after.finish_reason
    )
    end = _stop_across(ids, len(before.token_ids), stop, tokenizer)
    if end is None or (end == len(ids) and after.finish_reason is FinishReason.EOS):
        return whole
    return Completion(ids[:end], whole.logprobs[:end], whole.policy_versions[:end], FinishReason.STOP)


def _stop_across(ids: tuple[int, ...], seam: int, stop: Sequence[str], tokenizer: Any) -> int | None:
    """How many tokens there are up to the one that completes a stop string begun before the seam; None if none does."""
    if not stop or seam == 0:
        return None
    # A token may be a single byte of the string. Four more: the first decoded tokens may be parts of a character.
    longest = max(len(s.encode()) for s in stop) + 4
    for end in range(seam + 1, min(len(ids), seam + longest) + 1):
        tail = ids[max(0, end - longest) : end]
        text = tokenizer.decode(list(tail), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(s in text for s in stop):
            return end
    return None


# Refusals -------------------------------------------------------------------------------------------------------------


def refusal(url: str, status: int, body: bytes, ask: Ask, model: str) -> EngineError:
    """The error for a 4xx answer, which no retry can mend: what the server said, and what to change."""
    said = body.decode(errors="replace")
    if "out of range float" in said.lower():
        return EngineError(
            f"The server {url} computes logprobs that are not numbers ({quoted(body)}), so the weights it holds are NaN "
            "or overflow. Its completions would be noise. Look for a broken push of weights, or an engine dtype that "
            "overflows; the policy's own weights are finite."
        )
    return EngineError(
        f"The server {url} refused prompt {ask.prompt.index} ({len(ask.context)} tokens, max_tokens {ask.max_tokens}) "
        f"with HTTP {status}: {quoted(body)}. The same request would be refused again. {_advice(status, said, model)}"
    )


def _advice(status: int, said: str, model: str) -> str:
    if status in (401, 403):
        return "Put the server's API key into the environment variable VLLM_API_KEY."
    if status == 404:
        return f"Check that the address is a vLLM server's and that it serves the model {model!r} (engine.model_name)."
    if "context length" in said or "max_model_len" in said or "maximum" in said:
        return "Lower sampling.max_tokens or data.max_prompt_tokens, or start the server with a larger --max-model-len."
    if "logprobs" in said:
        return "Start the server with --max-logprobs -1."
    return "Change the setting that it names, or use a newer vLLM."


def quoted(value: Any) -> str:
    """The beginning of what a server sent, on one line."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
