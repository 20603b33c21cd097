"""vLLM's own route for tokens, `/inference/v1/generate`: beside each completion it says which weights drew which tokens.

With it a request may span a change of weights: the server pauses, takes the new ones, computes its keys and values anew
and goes on, and the spans tell the versions apart to the token. The weights go by the names that the trainer gives them.
"""

from collections.abc import Mapping
from typing import Any

GENERATE = "/inference/v1/generate"

OF_THE_WIRE = {"model", "prompt", "return_token_ids", "return_tokens_as_token_ids", "echo", "stream"}
"""What a request to `/v1/completions` holds besides the knobs, which vLLM's SamplingParams take by the same names."""


class ForeignWeights(Exception):
    """Some tokens were drawn from weights that this run has not pushed: the server was restarted, or another run's."""


def knobs(completions_body: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a request that says how to draw."""
    return {name: value for name, value in completions_body.items() if name not in OF_THE_WIRE}


def generate_body(completions_body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request for this route."""
    return {
        "model": completions_body["model"],
        "token_ids": completions_body["prompt"],
        "sampling_params": knobs(completions_body),
        "return_token_ids": True,
        "stream": False,
    }


def as_completions_choice(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """A choice of this route as `/v1/completions` would have written it, with its `weight_versions`; others unchanged.

    A logprob that is not that of the token at its place is null, as is one that cannot be found.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping) or "content" not in logprobs:
        return choice
    entries, ids = logprobs["content"], choice.get("token_ids")
    known: dict[str, Any] = {}
    if isinstance(entries, list) and isinstance(ids, list) and len(entries) == len(ids):
        known = {
            "token_logprobs": [_own(entry, token) for entry, token in zip(entries, ids, strict=True)],
            "top_logprobs": [_tops(entry) for entry in entries],
        }
    return {**choice, "logprobs": known or None, "prompt_token_ids": answer.get("prompt_token_ids")}


def versions_by_spans(spans: Any, count: int, named: Mapping[str, int]) -> tuple[int, ...]:
    """The version of each of `count` tokens. Raises ForeignWeights, and ValueError if the spans are not one row of tokens."""
    versions: list[int] = []
    try:
        for span in spans:
            name, start, end = span["version"], span["start"], span["end"]
            if start != len(versions) or end <= start:
                raise ValueError
            if name not in named:
                raise ForeignWeights(f"tokens were drawn from the weights {name!r}")
            versions += [named[name]] * (end - start)
    except (TypeError, KeyError, ValueError):
        versions = []
    if len(versions) != count:
        raise ValueError(f"its weight_versions do not cover its {count} tokens one after the other ({spans!r})")
    return tuple(versions)


def _own(entry: Any, token: Any) -> Any:
    return entry.get("logprob") if isinstance(entry, Mapping) and entry.get("token_id") == token else None


def _tops(entry: Any) -> dict[str, Any]:
    tops = entry.get("top_logprobs") if isinstance(entry, Mapping) else None
    if not isinstance(tops, list):
        return {}
    return {
        f"token_id:{top['token_id']}": top.get("logprob")
        for top in tops
        if isinstance(top, Mapping) and "token_id" in top
    }
