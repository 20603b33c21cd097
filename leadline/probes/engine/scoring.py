"""The policy's own logprobs of drawn tokens: one sequence at a time, in float32, unpadded and unpacked: the truth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.objective.logprobs import token_entropies, token_logprobs
from leadline.objective.sampling import processed_logits
from leadline.probes.engine.drawn import Drawn
from leadline.settings.rollout import Sampling

Rows = Callable[[Sequence[int], Sequence[int]], Tensor | None]
"""Prompt and completion -> logits [token, vocab] that predict the completion's tokens; None = nothing to say on them."""

PLAIN = Sampling()
KEPT_LOGITS = 4_000_000
"""Most logits that are kept for fitting (16 MB)."""
MOST_KEPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Kept:
    """Some of the drawn tokens with all their logits, so that a parameter can be fitted without the model."""

    logits: Tensor
    token_ids: Tensor
    seen: Tensor
    """[token, vocab]: which entries its prompt and the completion before it hold."""
    engine: Tensor


def rows_of(model: Any, overrides: Mapping[str, Tensor] | None = None, *, untied: bool = False) -> Rows:
    """Rows of the model, with `overrides` in the place of its parameters of those names.

    `untied`: an override of a tied head leaves the embedding as it is.
    """

    device = next(model.parameters()).device
    own = {name: tensor.to(device) for name, tensor in (overrides or {}).items()}

    def rows(prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *completion]], device=device)
        with torch.no_grad():
            output = torch.func.functional_call(
                model, own, kwargs={"input_ids": ids, "use_cache": False}, tie_weights=not untied
            )
        logits: Tensor = output.logits[0, len(prompt) - 1 : -1].float().cpu()
        return logits

    return rows


def score(drawn: Drawn, rows: Rows, samplings: Sequence[Sampling]) -> list[Tensor]:
    """By sampling: log pi of each drawn token (float64), NaN where the rows have nothing to say."""
    scored: list[list[Tensor]] = [[] for _ in samplings]
    for prompt, completion in zip(drawn.prompts, drawn.completions, strict=True):
        logits = rows(prompt, completion)
        for values, sampling in zip(scored, samplings, strict=True):
            values.append(
                _nothing(completion) if logits is None else sampled_logprobs(logits, prompt, completion, sampling)
            )
    return [torch.cat(values) for values in scored]


def score_and_keep(drawn: Drawn, rows: Rows, sampling: Sampling) -> tuple[Tensor, Tensor, Kept]:
    """Logprobs and entropies of each token as asked for, and the logits of tokens spread over all completions."""
    logprobs, entropies, kept, ends = [], [], [], drawn.lengths.cumsum(0).tolist()
    stride, first = 0, 0
    for prompt, completion, end in zip(drawn.prompts, drawn.completions, ends, strict=True):
        logits = rows(prompt, completion)
        assert logits is not None
        stride = stride or -(-len(drawn.engine) // min(MOST_KEPT_TOKENS, max(8, KEPT_LOGITS // logits.shape[1])))
        begin = end - len(completion)
        processed = _processed(logits, prompt, completion, sampling)
        logprobs.append(token_logprobs(processed, torch.tensor(completion)).double())
        entropies.append(token_entropies(processed).double())
        places = torch.arange(len(completion))[first - begin :: stride]  # none in one shorter than the stride
        first = begin + int(places[-1]) + stride if len(places) else first
        seen = seen_before(prompt, completion, places.tolist(), logits.shape[1])
        kept.append(Kept(logits[places], torch.tensor(completion)[places], seen, drawn.engine[begin + places]))
    joined = (torch.cat([getattr(part, name) for part in kept]) for name in ("logits", "token_ids", "seen", "engine"))
    return torch.cat(logprobs), torch.cat(entropies), Kept(*joined)


def kept_logprobs(kept: Kept, sampling: Sampling) -> Tensor:
    """log pi of the kept tokens, sampled in this way."""
    logits = _process(kept.logits, kept.token_ids, kept.seen, sampling)
    return token_logprobs(logits, kept.token_ids).double()


def seen_before(prompt: Sequence[int], completion: Sequence[int], places: Sequence[int], vocab: int) -> Tensor:
    """[place, vocab]: the entry is in the prompt, or in the completion before the place."""
    seen = torch.zeros(len(places), vocab, dtype=torch.bool)
    for row, place in enumerate(places):
        seen[row, [*prompt, *completion[:place]]] = True
    return seen


def sampled_logprobs(logits: Tensor, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling) -> Tensor:
    """log pi (float64) of the completion's tokens, sampled in this way from these rows of logits."""
    return token_logprobs(_processed(logits, prompt, completion, sampling), torch.tensor(completion)).double()


def _processed(logits: Tensor, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling) -> Tensor:
    penalised = sampling.repetition_penalty != 1
    seen = seen_before(prompt, completion, range(len(completion)), logits.shape[1]) if penalised else None
    return _process(logits, torch.tensor(completion), seen, sampling)


def _process(logits: Tensor, token_ids: Tensor, seen: Tensor | None, sampling: Sampling) -> Tensor:
    return processed_logits(
        logits,
        temperature=sampling.temperature or 1.0,  # greedy: the logprob is the one at temperature 1
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seen=seen,
        keep=token_ids,
    )


def _nothing(completion: Sequence[int]) -> Tensor:
    return torch.full((len(completion),), torch.nan, dtype=torch.float64)
