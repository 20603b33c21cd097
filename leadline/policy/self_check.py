"""Which fast paths a model takes: those that change nothing, shown at the start on a few random tokens.

Measured against each sequence alone with the model's own attention and its whole logits: logprobs, and the gradient of a
weighted sum of them by one vector that is added to the embeddings, which passes through every layer and costs no memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from leadline.config import Config
from leadline.models import plain_model
from leadline.policy.attention import NAME, SPAN_NAME
from leadline.policy.batch import Batch, probe_batch
from leadline.policy.heads import ModelHead
from leadline.policy.step_loss import Scores


class Scoring(Protocol):
    """What the check sees of a policy, and sets."""

    config: Config
    model: nn.Module
    reference: nn.Module | None
    packs: bool
    head: ModelHead | None
    reference_head: ModelHead | None

    @property
    def device(self) -> torch.device: ...

    def logprobs(self, batch: Batch, completions: Sequence[int], *, reference: bool = False) -> Scores: ...


class Tolerance(NamedTuple):
    """How far a fast path may be off."""

    largest: float
    """Nats, any logprob."""
    mean: float
    """Nats, over the logprobs."""
    gradient: float
    """|difference| / |gradient|."""


EXACT = Tolerance(2e-4, 2e-4, 1e-3)
"""In float32: rounding, many times over."""
HALF = Tolerance(math.inf, 0.2, 0.2)
"""In half precision another order of summation moves a logprob of -15 by a tenth of a nat: what follows says more."""
NEIGHBOURS = 0.01
"""Nats by which, in half precision, other contents of a completion's neighbours may move its logprobs at most: the shapes
are the same, and so is the rounding (a mixture of experts alone groups its tokens anew)."""
ATTENDING = {"full_attention", "sliding_attention"}
"""Kinds of layers that may share a prompt. Another kind may show only in sequences longer than those tried here."""


class Measured(NamedTuple):
    """What one path gives."""

    logprobs: Tensor
    gradient: Tensor


def take_fast_paths(policy: Scoring) -> tuple[str, ...]:
    """The policy takes each fast path that changes nothing. A line for each that it does not take, with the reason."""
    batch = probe_batch(plain_model(policy.model).config.get_text_config().vocab_size, policy.config)
    embedding = next((m for m in policy.model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        return (
            "The model has no embedding to measure by, so its fast paths are not taken, which is slower and right.",
        )

    def measure() -> Measured:
        return measured(policy, batch, embedding)

    plain = measure()
    lines = (
        _take_head(policy, plain, measure),
        _compile_head(policy, plain, measure),
        _take_rows(policy, plain, measure, batch),
    )
    return tuple(line for line in lines if line)


@torch.enable_grad()
def measured(policy: Scoring, batch: Batch, embedding: nn.Embedding) -> Measured:
    """Logprobs of the batch on the path that the policy takes, and their gradient, of as many numbers as a token has."""
    shift = torch.zeros(embedding.embedding_dim, device=policy.device, dtype=embedding.weight.dtype, requires_grad=True)
    with _shifted(embedding, shift):
        logprobs = policy.logprobs(batch, batch.forwarded).logprobs
    weights = torch.linspace(-1, 2, len(logprobs), device=logprobs.device)
    [gradient] = torch.autograd.grad((logprobs * weights).sum(), [shift])
    return Measured(logprobs.detach(), gradient.float())


@contextmanager
def _shifted(embedding: nn.Embedding, shift: Tensor) -> Iterator[None]:
    """The shift enters at each token by another amount, so that no two of them can stand in for each other."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        amounts = torch.cos(inputs[0].float())[..., None].to(output.dtype)
        return output + amounts * shift

    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


FAILURES = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, ImportError)
"""What a path raises that a model cannot go."""


def _take_head(policy: Scoring, plain: Measured, measure: Callable[[], Measured]) -> str | None:
    try:
        policy.head = ModelHead(policy.model)
        policy.reference_head = None if policy.reference is None else ModelHead(policy.reference)
        reason = difference(measure(), plain, tolerance(policy))
    except FAILURES as error:
        reason = str(error)
    if reason is None:
        return None
    policy.head = policy.reference_head = None
    return f"Logits are computed whole, not a chunk at a time ({reason}), which takes more memory and is right."


def _compile_head(policy: Scoring, plain: Measured, measure: Callable[[], Measured]) -> str | None:
    wanted = policy.config.model.compile
    heads = [head for head in (policy.head, policy.reference_head) if head is not None]
    if not heads or not (policy.device.type == "cuda" if wanted == "auto" else wanted):
        return None
    for head in heads:
        head.compiled = True
    try:
        reason = difference(measure(), plain, tolerance(policy))
    except FAILURES as error:
        reason = str(error).strip().partition("\n")[0]
    if reason is None:
        return None
    for head in heads:
        head.compiled = False
    return f"Log-probabilities are not computed by compiled kernels ({reason}), which is slower and right."


def _take_rows(policy: Scoring, plain: Measured, measure: Callable[[], Measured], batch: Batch) -> str | None:
    reason = _static_reason(policy)
    if reason is None:
        own = plain_model(policy.model).config._attn_implementation
        policy.packs = True
        reason = _try_attention(policy, NAME, plain, measure, batch)
        if reason is None:
            return None
        if _try_attention(policy, SPAN_NAME, plain, measure, batch) is None:
            return f"Attention goes span by span, which is slower and right: {reason}."
        policy.packs = False
        set_attention(policy, own)
    return (
        f"The prompt of a group is not shared within a row ({reason}): each sequence is forwarded on its own, which is "
        "slower and right."
    )


def _static_reason(policy: Scoring) -> str | None:
    """Why prompts cannot be shared, as far as it needs no measuring."""
    model, wanted = plain_model(policy.model), policy.config.model.attention
    odd = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - ATTENDING
    if wanted not in ("sdpa", "eager"):
        return f"model.attention = {wanted!r} is kept"
    if odd:
        return f"it has layers of the kind {', '.join(sorted(odd))}"
    return None if hasattr(model, "set_attn_implementation") else "its attention cannot be set"


def _try_attention(
    policy: Scoring, name: str, plain: Measured, measure: Callable[[], Measured], batch: Batch
) -> str | None:
    """With this attention set: what is wrong with it."""
    set_attention(policy, name)
    try:
        return difference(measure(), plain, tolerance(policy)) or _hears_neighbours(policy, batch)
    except FAILURES as error:
        return str(error)


def _hears_neighbours(policy: Scoring, batch: Batch) -> str | None:
    """In half precision, where a comparison with sequences alone is blunt: whether others' contents move a logprob."""
    if tolerance(policy) is EXACT:
        return None
    kept = [max(c for c in batch.forwarded if batch.group_of_completion[c] == g) for g in range(batch.num_groups)]
    tokens = batch.tokens_of(kept)
    others = batch.token_ids.flip(0)
    others[tokens] = batch.token_ids[tokens]
    with torch.no_grad():
        before, after = (
            policy.logprobs(made, batch.forwarded).logprobs.cpu() for made in (batch, replace(batch, token_ids=others))
        )
    places = torch.isin(batch.tokens_of(batch.forwarded), tokens)
    apart = float((after - before)[places].abs().max())
    return None if apart <= NEIGHBOURS else f"what its neighbours hold changes a logprob by {apart:.2g} nats"


def set_attention(policy: Scoring, name: str) -> None:
    """Policy and reference take their attention from this implementation."""
    for model in (policy.model, policy.reference):
        if model is not None:
            plain_model(model).set_attn_implementation(name)


def tolerance(policy: Scoring) -> Tolerance:
    """That of the policy's dtype."""
    return EXACT if next(policy.model.parameters()).dtype == torch.float32 else HALF


def difference(found: Measured, plain: Measured, allowed: Tolerance) -> str | None:
    """In words, if it is not allowed; a NaN is not."""
    apart = (found.logprobs - plain.logprobs).abs()
    largest, mean = float(apart.max()), float(apart.mean())
    gradient = float((found.gradient - plain.gradient).norm() / plain.gradient.norm())
    if largest <= allowed.largest and mean <= allowed.mean and gradient <= allowed.gradient:
        return None
    return f"logprobs would change by up to {largest:.2g} nats and a gradient by {gradient:.2g} of its size"
