"""What a model says of the tokens of some rows: their logprobs and entropies."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leadline.config import Config
from leadline.models import plain_model
from leadline.objective.chunked import chunked_scores
from leadline.objective.chunks import Replay, Seen
from leadline.objective.logprobs import token_entropies, token_logprobs
from leadline.objective.sampling import processed_logits
from leadline.policy.attention import laid_out
from leadline.policy.batch import Batch, Row
from leadline.policy.heads import ModelHead, head_input
from leadline.policy.step_loss import Scores


def score_rows(
    model: nn.Module, head: ModelHead | None, batch: Batch, rows: Sequence[Row], config: Config, *, packs: bool
) -> Scores:
    """log pi and entropy of each token of the rows, of the distribution that was sampled.

    With `head` from the hidden states, a chunk of logits at a time; without, or if a hook edits the head's logits, from
    the whole logits of a row. Entropies have a gradient if there is an entropy bonus. `packs` is whether the completions
    in a row share its prompts.
    """
    bonus = config.objective.entropy_bonus != 0
    if head is None or head.edited:
        parts = [_whole_scores(_logits(model, row, packs), batch, row, config, bonus) for row in rows]
        return Scores(torch.cat([s.logprobs for s in parts]), torch.cat([s.entropies for s in parts]))
    hidden, layer = head.on(torch.cat([_hidden_states(model, head, row, packs) for row in rows]))
    token_ids = torch.cat([row.token_ids for row in rows]).to(hidden.device)
    replay = _replay(batch, rows, config, hidden.device)
    return Scores(*chunked_scores(hidden, layer, token_ids, replay, entropy_gradient=bonus, compiled=head.compiled))


def _hidden_states(model: nn.Module, head: ModelHead, row: Row, packs: bool) -> Float[Tensor, "token width"]:
    """The head's input at the positions that predict a completion token."""
    with head_input(head) as inputs:
        _forward(model, row, packs)
    [hidden] = inputs
    return hidden[0] if _takes_logits_to_keep(model) else hidden[0, row.predicts.to(hidden.device)]


def _logits(model: nn.Module, row: Row, packs: bool) -> Float[Tensor, "token vocab"]:
    """Logits at the positions that predict a completion token."""
    logits: Tensor = _forward(model, row, packs).logits[0]
    return logits if _takes_logits_to_keep(model) else logits[row.predicts.to(logits.device)]


def _forward(model: nn.Module, row: Row, packs: bool) -> Any:
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"logits_to_keep": row.predicts.to(device)} if _takes_logits_to_keep(model) else {}
    with laid_out(row.spans) if packs else contextlib.nullcontext():
        return model(
            input_ids=row.input_ids.to(device), position_ids=row.position_ids.to(device), use_cache=False, **inputs
        )


def _takes_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(plain_model(model).forward).parameters


def _whole_scores(logits: Float[Tensor, "token vocab"], batch: Batch, row: Row, config: Config, bonus: bool) -> Scores:
    targets = row.token_ids.to(logits.device)
    replay = _replay(batch, [row], config, logits.device)
    everything = slice(0, len(logits)), slice(0, logits.shape[1])
    logits = processed_logits(
        logits,
        temperature=replay.temperature,
        top_k=replay.top_k,
        top_p=replay.top_p,
        min_p=replay.min_p,
        repetition_penalty=replay.repetition_penalty,
        seen=None if replay.seen is None else replay.seen.block(*everything),
        keep=targets,
    )
    with torch.set_grad_enabled(torch.is_grad_enabled() and bonus):
        entropies = token_entropies(logits)
    return Scores(token_logprobs(logits, targets), entropies)


def _replay(batch: Batch, rows: Sequence[Row], config: Config, device: torch.device) -> Replay:
    sampling = config.sampling
    return Replay(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seen=_seen(batch, rows).to(device) if sampling.repetition_penalty != 1 else None,
    )


def _seen(batch: Batch, rows: Sequence[Row]) -> Seen:
    prompts = [batch.prompt_ids[int(batch.group_of_completion[c])].tolist() for row in rows for c in row.completions]
    pieces = [piece.tolist() for row in rows for piece in row.pieces()]
    return Seen.in_contexts(zip(prompts, pieces, strict=True))
