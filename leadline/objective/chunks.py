"""What `chunked.py` computes piece by piece, and which pieces it takes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.objective.sampling import scaled_logits

NARROWEST = 256
"""A block of the vocabulary has at least so many entries, however many tokens there are."""


@dataclass(frozen=True, slots=True)
class Head:
    """logits = softcap tanh(scale (h W^T + bias) / softcap), without the tanh if there is no soft cap."""

    weight: Float[Tensor, "vocab width"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """Which vocabulary entries a token's prompt, and the completion before it, hold.

    Example: prompt 5, completion 7 5 7: first[0] is -1 at 5, 0 at 7; the second token has place 1 and sees 5 and 7.
    """

    first: Int[Tensor, "completion vocab"]
    """Place in the completion where the entry comes first: -1 if in the prompt, past all places if nowhere."""
    completion_of_token: Int[Tensor, " token"]
    place: Int[Tensor, " token"]
    """Of the token in its completion."""

    def block(self, tokens: slice | Tensor, entries: slice) -> Bool[Tensor, "selected entry"]:
        """For these tokens, which of these entries they see."""
        return self.first[:, entries][self.completion_of_token[tokens]] < self.place[tokens][:, None]


@dataclass(frozen=True, slots=True)
class Replay:
    """How logits became what was sampled, see `sampling.processed_logits`; `seen` only with a penalty."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seen: Seen | None = None

    @property
    def truncates(self) -> bool:
        """Whether entries can fall."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How the scores of some tokens are computed: all that has no gradient."""

    token_ids: Int[Tensor, " token"]
    vocab: int
    scale: float
    softcap: float | None
    replay: Replay
    sweep: int
    """About so many logits exist at once."""
    entropy_gradient: bool
    compiled: bool = False
    """Take compiled kernels where there are some."""

    @property
    def factor(self) -> float:
        """From the head's product to the logits of what is sampled, where it `multiplies`."""
        return self.scale / self.replay.temperature

    @property
    def fuses(self) -> bool:
        """What lies between the products is one kernel each way, see `fused.py`."""
        return self.compiled and self.multiplies and not self.replay.truncates

    @property
    def multiplies(self) -> bool:
        """Whether what is sampled is the head's product times a number, before any entry falls."""
        return self.softcap is None and self.replay.repetition_penalty == 1

    @property
    def in_one_chunk(self) -> bool:
        return len(self.token_ids) * self.vocab <= 2 * self.sweep

    def chunks(self) -> Iterator[slice]:
        """Of the tokens, for the forward pass."""
        count = len(self.token_ids)
        size = max(1, count if self.in_one_chunk else self.sweep // self.vocab)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def parts(self, live: Bool[Tensor, " token"], kept: bool) -> Iterator[tuple[slice | Tensor, list[slice]]]:
        """For the backward pass: tokens, and the blocks of the vocabulary to take with them.

        All tokens with a gradient at once. But where entries fell and are to fall again, the chunks of the forward pass: the
        same product of the same shape has the same last digit, so an entry at the edge of the support does what it did.
        """
        if self.replay.truncates and not kept:
            yield from ((tokens, [slice(0, self.vocab)]) for tokens in self.chunks())
            return
        rows = slice(None) if bool(live.all()) else live.nonzero()[:, 0]
        size = max(NARROWEST, self.sweep // max(1, int(live.sum())))
        yield rows, [slice(start, min(start + size, self.vocab)) for start in range(0, self.vocab, size)]

    def scaled(self, product: Tensor, tokens: slice | Tensor, entries: slice) -> Float[Tensor, "selected entry"]:
        """The head's product -> float32 logits of what is sampled, before any falls; may overwrite it without gradient."""
        replay = self.replay
        logits = product.float()
        if self.multiplies and not torch.is_grad_enabled():
            logits = logits if self.scale == 1 else logits.mul_(self.scale)
            return logits if replay.temperature == 1 else logits.div_(replay.temperature)
        logits = logits if self.scale == 1 else logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        seen = None if replay.seen is None else replay.seen.block(tokens, entries)
        return scaled_logits(
            logits, temperature=replay.temperature, repetition_penalty=replay.repetition_penalty, seen=seen
        )


class Room:
    """Memory that pieces use in turn: fresh memory costs a CPU more time than the arithmetic done in it."""

    def __init__(self, like: Tensor) -> None:
        self._flat = like.new_empty(0)

    def take(self, rows: int, columns: int) -> Tensor:
        """Uninitialised [rows, columns], the same memory each time."""
        if self._flat.numel() < rows * columns:
            self._flat = self._flat.new_empty(rows * columns)
        return self._flat[: rows * columns].view(rows, columns)


def product(
    hidden: Float[Tensor, "token width"], weight: Float[Tensor, "entry width"], bias: Tensor | None, room: Room
) -> Float[Tensor, "token entry"]:
    """h W^T + bias."""
    made = torch.mm(hidden, weight.t(), out=room.take(len(hidden), len(weight)))
    return made if bias is None else made.add_(bias)
