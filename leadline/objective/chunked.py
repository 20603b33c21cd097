"""Log-probability and entropy per token from hidden states: logits exist for a chunk at a time, and no longer.

    forward    for a chunk of tokens, the whole vocabulary:   z = h W^T,  s = processed(z),  logsumexp, logprob, entropy
    backward   for a block of the vocabulary, all tokens:     z and s again,  g = dL/dz,
               dL/dh += g W_block,  dL/dW_block = g^T h

The forward goes by tokens, since a normaliser needs a whole row. The backward goes by blocks of
the vocabulary, since with the normaliser known a block needs nothing of the others: each row of dL/dW is computed once,
from all tokens, and no second matrix of the head's size is summed up. Saved are h and a few numbers per token.

Tokens that fit into one chunk keep their logits for the backward: nothing would be saved by recomputing them.

Where sampling truncates, `truncated.py` takes over. What lies between the products is done in place, one operation of torch at a time, or by the compiled kernels of `fused.py`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from leadline.objective import fused
from leadline.objective.chunks import Head, Plan, Replay, Room, product
from leadline.objective.truncated import TruncatedScores

SWEEP = 2**24
"""Logits at once on a CPU: 64 MiB in float32. With more it waits for fresh memory, with fewer products become thin."""
ACCELERATOR_SWEEP = 2**27
"""Logits at once elsewhere."""


def chunked_scores(
    hidden: Float[Tensor, "token width"],
    head: Head,
    token_ids: Int[Tensor, " token"],
    replay: Replay,
    *,
    entropy_gradient: bool = False,
    compiled: bool = False,
    sweep: int | None = None,
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"]]:
    """log p(token_id) and the entropy of each row's processed distribution, in nats, in float32.

    They equal `token_logprobs` and `token_entropies` of `processed_logits` of the head's logits, and so do the gradients
    of hidden states and head; entropies have one only with `entropy_gradient`. About `sweep` logits exist at once. Rows
    whose gradient is exactly 0 take no part in the backward pass: a NaN in them stays where it is. With `compiled` the
    kernels of `fused.py` are taken where they serve (`Plan.fuses`).
    """
    if sweep is None:
        sweep = SWEEP if hidden.device.type == "cpu" else ACCELERATOR_SWEEP
    plan = Plan(token_ids.long(), len(head.weight), head.scale, head.softcap, replay, sweep, entropy_gradient, compiled)
    way: Any = TruncatedScores if replay.truncates else _ChunkedScores
    logprobs, entropies = way.apply(plan, hidden, head.weight, head.bias)
    return logprobs, entropies


class _ChunkedScores(torch.autograd.Function):
    """See the top of the file."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs, entropies, tops, log_sums = hidden.new_empty(4, len(hidden), dtype=torch.float32).unbind()
        products, masses = Room(hidden), Room(log_sums)
        logits = None
        for tokens in plan.chunks():
            logits = product(hidden[tokens], weight, bias, products)
            targets = plan.token_ids[tokens]
            if plan.fuses:
                found = fused.compiled(fused.row_scores)(logits, targets, plan.factor)
                logprobs[tokens], entropies[tokens], tops[tokens], log_sums[tokens] = found
                continue
            logits = logits.float()
            plan.scale_(logits, tokens, slice(0, plan.vocab))
            tops[tokens] = logits.amax(-1)
            logits.sub_(tops[tokens, None])
            logprobs[tokens], entropies[tokens], log_sums[tokens] = _row_scores(logits, targets, masses)
        kept = logits if plan.in_one_chunk and plan.multiplies else None
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, tops, log_sums, entropies, kept)
        if not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor, by_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tops, log_sums, entropies, kept = ctx.saved_tensors
        plan: Plan = ctx.plan
        rows = _Rows(hidden, plan.token_ids, tops, log_sums, entropies, kept, by_logprobs, by_entropies)
        tokens, blocks = plan.parts(rows.live)
        wanted = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad[1:], strict=True))
        by_weight = torch.zeros_like(weight) if wanted["weight"] else None
        by_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted["bias"] else None
        part = _Part(plan, tokens, rows.of(tokens), weight, bias, Room(hidden), Room(log_sums))
        gradient = part.add_gradients(blocks, by_weight, by_bias)
        by_hidden = None
        if wanted["hidden"]:
            by_hidden = torch.zeros_like(hidden)
            by_hidden[tokens] = gradient.to(hidden.dtype)
        return None, by_hidden, by_weight, None if by_bias is None else by_bias.to(bias.dtype)


class _Rows(NamedTuple):
    """By token: what went in, what the forward pass found, and dL / d(its results)."""

    hidden: Tensor
    token_ids: Tensor
    tops: Tensor
    log_sums: Tensor
    entropies: Tensor
    kept: Tensor | None
    by_logprobs: Tensor
    by_entropies: Tensor

    @property
    def live(self) -> Tensor:
        """The token has a gradient."""
        return (self.by_logprobs != 0) | (self.by_entropies != 0)

    def of(self, tokens: slice | Tensor) -> "_Rows":
        return _Rows(*(None if x is None else x[tokens] for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tokens of a backward pass."""

    plan: Plan
    tokens: slice | Tensor
    rows: _Rows
    weight: Tensor
    bias: Tensor | None
    products: Room
    gradients: Room

    def add_gradients(self, blocks: list[slice], by_weight: Tensor | None, by_bias: Tensor | None) -> Tensor:
        """dL / d(hidden) of these tokens; what they add to the head's gradients is added to them."""
        hidden, dead = self.rows.hidden, ~self.rows.live[:, None]
        if has_dead := bool(dead.any()):
            hidden = hidden.masked_fill(dead, 0.0)
        by_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        for entries in blocks:
            by_product = self._by_product(entries)
            if has_dead:
                by_product.masked_fill_(dead, 0.0)
            if by_bias is not None:
                by_bias[entries] += by_product.sum(0)
            by_product = by_product.to(hidden.dtype)
            _add_product(by_hidden, by_product, self.weight[entries])
            if by_weight is not None:
                _add_product(by_weight[entries], by_product.t(), hidden)
        return by_hidden

    def _by_product(self, entries: slice) -> Float[Tensor, "part entry"]:
        """dL / d(head's product) of a block of the vocabulary."""
        plan = self.plan
        if plan.fuses:
            return self._by_product_fused(entries)
        if not plan.multiplies:
            return self._by_product_bent(entries)
        logprobs = self._logprobs(entries)
        penalised = self._penalised(logprobs, entries)
        gradient = self._by_scaled(logprobs, entries)
        if plan.factor != 1:
            gradient.mul_(plan.factor)
        if penalised is not None:
            places, slopes = penalised
            gradient[places] *= slopes
        return gradient

    def _logprobs(self, entries: slice) -> Float[Tensor, "part entry"]:
        plan, rows = self.plan, self.rows
        if rows.kept is not None:
            kept = rows.kept[:, entries]
            return torch.sub(kept, rows.log_sums[:, None], out=self.gradients.take(*kept.shape))
        scaled = self._product(entries).float()
        plan.scale_(scaled, self.tokens, entries)
        return scaled.sub_((rows.tops + rows.log_sums)[:, None])

    def _penalised(self, logprobs: Tensor, entries: slice) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """Where tokens see an entry, and what the penalty multiplies its logit by there, which goes by the logit's sign."""
        seen, penalty, rows = self.plan.replay.seen, self.plan.replay.repetition_penalty, self.rows
        if seen is None:
            return None
        places = seen.places(slice(0, len(logprobs)), entries)
        scaled = logprobs[places] + (rows.tops + rows.log_sums)[places[0]]
        return places, torch.where(scaled > 0, 1 / penalty, penalty)

    def _by_product_bent(self, entries: slice) -> Float[Tensor, "part entry"]:
        """The same under a soft cap."""
        rows, seen = self.rows, self.plan.replay.seen
        made = self._product(entries)
        under = None if seen is None else seen.block(slice(0, len(made)), entries)
        with torch.enable_grad():
            leaf = made.detach().requires_grad_()
            scaled = self.plan.scaled(leaf, under)
        by_scaled = self._by_scaled(scaled.detach() - (rows.tops + rows.log_sums)[:, None], entries)
        return torch.autograd.grad(scaled, leaf, by_scaled)[0]

    def _product(self, entries: slice) -> Float[Tensor, "part entry"]:
        bias = None if self.bias is None else self.bias[entries]
        return product(self.rows.hidden, self.weight[entries], bias, self.products)

    def _by_product_fused(self, entries: slice) -> Float[Tensor, "part entry"]:
        """The same, by a compiled kernel. What was kept is the product."""
        plan, rows = self.plan, self.rows
        made = self._product(entries) if rows.kept is None else rows.kept[:, entries]
        gradient: Tensor = fused.compiled(fused.by_product)(
            made,
            rows.tops + rows.log_sums,
            rows.token_ids - entries.start,
            rows.by_logprobs,
            rows.entropies,
            rows.by_entropies,
            plan.factor,
        )
        return gradient

    def _by_scaled(self, logprobs: Tensor, entries: slice) -> Float[Tensor, "part entry"]:
        """dL/ds = dL/dlogprob (1[y] - p) - dL/dH p (l + H), for log-probabilities l (overwritten), p = exp(l), target y."""
        by_logprobs = self.rows.by_logprobs[:, None]
        if self.plan.entropy_gradient:
            slope = logprobs.masked_fill(logprobs == -math.inf, 0.0).add_(self.rows.entropies[:, None])
            slope.mul_(self.rows.by_entropies[:, None]).add_(by_logprobs)
            gradient = logprobs.exp_().mul_(slope.neg_())
        else:
            gradient = logprobs.exp_().mul_(-by_logprobs)
        place = self.rows.token_ids[:, None] - entries.start
        here = (place >= 0) & (place < gradient.shape[1])
        return gradient.scatter_add_(1, place.clamp(0, gradient.shape[1] - 1), torch.where(here, by_logprobs, 0.0))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if left.dtype == total.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _row_scores(
    below: Float[Tensor, "token vocab"], targets: Int[Tensor, " token"], room: Room
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"], Float[Tensor, " token"]]:
    """(logprob of the target, entropy, logsumexp) of logits from which each row's largest was taken."""
    masses = torch.exp(below, out=room.take(*below.shape))
    total = masses.sum(-1)
    log_total = total.log()
    products = masses.mul_(below)  # in place: one matrix of the logits' size less
    weighted = products.sum(-1)
    if bool(weighted.isnan().any()):  # 0 times -inf, where entries fell: p log p is 0 in the limit
        weighted = products.masked_fill_(below == -math.inf, 0.0).sum(-1)
    return below.gather(-1, targets[:, None])[:, 0] - log_total, log_total - weighted / total, log_total
