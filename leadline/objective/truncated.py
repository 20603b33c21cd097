"""Log-probability and entropy where sampling truncates: only the entries that a token could have been have a gradient.

    forward    for a chunk of tokens, the whole vocabulary:   z = h W^T,  s = scaled(z),  support = {v: s_v >= floor, or v drawn};
               kept are the supports' z, a few entries a token
    backward   for the chunk, with U = the entries in the support of any of its tokens:
               g = dL/dz on the supports, 0 elsewhere:   dL/dh = g W_U,  dL/dW_U += g^T h

So the backward pass multiplies with a few rows of the head instead of all of it. Supports that would take about as much room as
a chunk's logits are not kept but found again, by the same product of the same shape: its last digits are the same, and so an
entry at the edge of the support falls again or stays. Where hardly anything falls, tokens are taken a few at a time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from leadline.objective.chunks import Plan, Room, product
from leadline.objective.sampling import support_floor

AT_ONCE = 8
"""Places in supports at once: the sweep divided by this. A place takes several numbers, a logit one."""


class Support(NamedTuple):
    """The entries that stay, of some consecutive tokens, in their order: at least one of each."""

    tokens: slice
    token: Int[Tensor, " place"]
    """Counted from the first of these tokens."""
    entry: Int[Tensor, " place"]
    product: Float[Tensor, " place"]
    """z."""
    drawn: Bool[Tensor, " place"]
    """This entry is the token itself."""
    seen: Bool[Tensor, " place"] | None
    """It is under the repetition penalty; None = there is none."""


class TruncatedScores(torch.autograd.Function):
    """See the top of the file."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs, entropies = hidden.new_empty(2, len(hidden), dtype=torch.float32).unbind()
        rooms = Room(hidden), Room(logprobs)
        kept: list[list[Support] | None] = []
        room = plan.sweep // AT_ONCE
        for tokens in plan.chunks():
            supports: list[Support] = []
            for support in _supports(plan, tokens, hidden, weight, bias, rooms):
                scaled = plan.scaled(support.product, support.seen)
                logprobs[support.tokens], entropies[support.tokens] = _scores(support, scaled)
                room -= len(support.token)
                supports = [*supports, support] if room >= 0 else []
            kept.append(supports if room >= 0 else None)
        ctx.plan, ctx.kept = plan, kept
        ctx.save_for_backward(hidden, weight, bias)
        if not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor, by_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        plan: Plan = ctx.plan
        by_hidden = torch.zeros_like(hidden)
        _, *wanted = ctx.needs_input_grad[1:]
        by_weight, by_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((weight, bias), wanted, strict=True)
        )
        rooms = Room(hidden), Room(by_logprobs)
        for chunk, kept in zip(plan.chunks(), ctx.kept, strict=True):
            for support in _supports(plan, chunk, hidden, weight, bias, rooms) if kept is None else kept:
                tokens = support.tokens
                gradient = _by_product(plan, support, by_logprobs[tokens], by_entropies[tokens])
                live = (by_logprobs[tokens] != 0) | (by_entropies[tokens] != 0)
                entries, column = support.entry.unique(return_inverse=True)
                matrix = gradient.new_zeros(len(live), len(entries))
                matrix[support.token, column] = torch.where(live[support.token], gradient, 0.0)
                if by_bias is not None:
                    by_bias.index_add_(0, entries, matrix.sum(0))
                matrix = matrix.to(hidden.dtype)
                by_hidden[tokens] = matrix @ weight[entries]
                if by_weight is not None:
                    inputs = hidden[tokens].masked_fill(~live[:, None], 0.0)
                    by_weight.index_add_(0, entries, (matrix.t() @ inputs).float())
        totals = ((by_weight, weight), (by_bias, bias))
        return None, by_hidden, *(None if total is None else total.to(x.dtype) for total, x in totals)


def _supports(
    plan: Plan, tokens: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, rooms: tuple[Room, Room]
) -> Iterator[Support]:
    """Of the tokens of a chunk: of all at once, or of as many as have room."""
    logits = product(hidden[tokens], weight, bias, rooms[0])
    scaled = rooms[1].take(*logits.shape).copy_(logits)
    plan.scale_(scaled, tokens, slice(0, plan.vocab))
    replay = plan.replay
    floor = support_floor(scaled, top_k=replay.top_k, top_p=replay.top_p, min_p=replay.min_p)
    stays = torch.ones_like(scaled, dtype=torch.bool) if floor is None else scaled >= floor
    stays.scatter_(1, plan.token_ids[tokens, None], True)
    for rows in _rows_with_room(stays, plan.sweep // AT_ONCE):
        few = slice(tokens.start + rows.start, tokens.start + rows.stop)
        yield _support(plan, few, logits[rows], stays[rows])


def _rows_with_room(stays: Bool[Tensor, "token vocab"], room: int) -> Iterator[slice]:
    """Consecutive rows in which no more stay together, or one in which more do."""
    start, held = 0, 0
    if int(stays.count_nonzero()) > room:
        for row, count in enumerate(stays.sum(1).tolist()):
            if row > start and held + count > room:
                yield slice(start, row)
                start, held = row, 0
            held += count
    yield slice(start, len(stays))


def _support(plan: Plan, tokens: slice, logits: Tensor, stays: Bool[Tensor, "token vocab"]) -> Support:
    token, entry = stays.nonzero().unbind(1)
    seen = None
    if plan.replay.seen is not None:
        token_seen, entry_seen = plan.replay.seen.places(tokens, slice(0, plan.vocab))
        seen = torch.isin(token * plan.vocab + entry, token_seen * plan.vocab + entry_seen)
    drawn = entry == plan.token_ids[tokens][token]
    return Support(tokens, token, entry, logits[token, entry].float(), drawn, seen)


class _Softmax(NamedTuple):
    """Over each token's support."""

    logprob: Float[Tensor, " place"]
    """log p."""
    mass: Float[Tensor, " place"]
    """p."""
    entropy: Float[Tensor, " token"]


def _softmax(support: Support, scaled: Float[Tensor, " place"]) -> _Softmax:
    token = support.token
    zeros = scaled.new_zeros(int(support.drawn.sum()))
    tops = torch.full_like(zeros, -torch.inf).scatter_reduce_(0, token, scaled, "amax")
    below = scaled - tops[token]
    log_total = zeros.index_add(0, token, below.exp()).log()
    logprob = below - log_total[token]
    mass = logprob.exp()
    parts = torch.where(mass == 0, 0.0, mass * logprob)  # p log p is 0 in the limit
    return _Softmax(logprob, mass, -zeros.index_add(0, token, parts))


def _scores(support: Support, scaled: Float[Tensor, " place"]) -> tuple[Tensor, Tensor]:
    """(log p of what was drawn, entropy) by token."""
    found = _softmax(support, scaled)
    return found.logprob[support.drawn], found.entropy


def _by_product(
    plan: Plan, support: Support, by_logprobs: Float[Tensor, " token"], by_entropies: Float[Tensor, " token"]
) -> Float[Tensor, " place"]:
    """dL/dz, through dL/ds = dL/dlogprob (1[drawn] - p) - dL/dH p (log p + H)."""
    with torch.enable_grad():
        leaf = support.product.detach().requires_grad_()
        scaled = plan.scaled(leaf, support.seen)
    token, found = support.token, _softmax(support, scaled.detach())
    by_scaled = by_logprobs[token] * (support.drawn.float() - found.mass)
    if plan.entropy_gradient:
        slope = torch.where(found.mass == 0, 0.0, found.mass * (found.logprob + found.entropy[token]))
        by_scaled -= by_entropies[token] * slope
    return torch.autograd.grad(scaled, leaf, by_scaled)[0]
