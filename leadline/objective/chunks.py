"""What `chunked.py` computes piece by piece, and which pieces it takes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.objective.sampling import penalised, scaled_logits

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
    """Which vocabulary entries a token's prompt, and the completion before it, hold: few of them, so they are listed.

    Example: prompt 5, completion 7 5 7: entry 5 is seen from token 0 on, entry 7 from token 1 on, both before token 3.
    """

    entry: Int[Tensor, " sighting"]
    since: Int[Tensor, " sighting"]
    """The first token that sees the entry ..."""
    until: Int[Tensor, " sighting"]
    """... and the one behind the last: the end of its completion."""

    @classmethod
    def in_contexts(cls, contexts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> "Seen":
        """By the (prompt, completion) of consecutive tokens."""
        sightings: list[tuple[int, int, int]] = []
        start = 0
        for prompt, completion in contexts:
            first = dict.fromkeys(prompt, 0)
            for place, entry in enumerate(completion):
                first.setdefault(entry, place + 1)
            stop = start + len(completion)
            sightings.extend((entry, start + since, stop) for entry, since in first.items() if start + since < stop)
            start = stop
        return cls(*torch.tensor(sightings, dtype=torch.int64).reshape(-1, 3).unbind(1))

    def to(self, device: torch.device) -> "Seen":
        return Seen(self.entry.to(device), self.since.to(device), self.until.to(device))

    def places(self, tokens: slice, entries: slice) -> tuple[Int[Tensor, " seen"], Int[Tensor, " seen"]]:
        """(token, entry), counted from the slices' starts, wherever one of these tokens sees one of these entries."""
        here = (self.entry >= entries.start) & (self.entry < entries.stop)
        since, until = (x[here].clamp(tokens.start, tokens.stop) for x in (self.since, self.until))
        counts = until - since
        sighting = torch.repeat_interleave(counts)
        nth = torch.arange(len(sighting), device=counts.device) - (counts.cumsum(0) - counts)[sighting]
        return since[sighting] + nth - tokens.start, self.entry[here][sighting] - entries.start

    def block(self, tokens: slice, entries: slice) -> Bool[Tensor, "selected entry"]:
        """The same as a matrix."""
        seen = torch.zeros(
            tokens.stop - tokens.start, entries.stop - entries.start, dtype=torch.bool, device=self.entry.device
        )
        seen[self.places(tokens, entries)] = True
        return seen


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
        return self.compiled and self.multiplies and self.replay.seen is None

    @property
    def multiplies(self) -> bool:
        """Whether what is sampled is the head's product times a number: under a penalty another one where it was seen."""
        return self.softcap is None

    @property
    def in_one_chunk(self) -> bool:
        return len(self.token_ids) * self.vocab <= 2 * self.sweep

    def chunks(self) -> Iterator[slice]:
        """Of the tokens, for the forward pass."""
        count = len(self.token_ids)
        size = max(1, count if self.in_one_chunk else self.sweep // self.vocab)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def parts(self, live: Bool[Tensor, " token"]) -> tuple[slice | Tensor, list[slice]]:
        """For the backward pass: the tokens with a gradient, and the blocks of the vocabulary to take with them.

        Under a penalty all tokens: who sees what is listed by consecutive ones.
        """
        everything = slice(0, len(self.token_ids))
        rows = everything if self.replay.seen is not None or bool(live.all()) else live.nonzero()[:, 0]
        size = max(NARROWEST, self.sweep // max(1, int(live.sum())))
        return rows, [slice(start, min(start + size, self.vocab)) for start in range(0, self.vocab, size)]

    def scale_(self, logits: Float[Tensor, "selected entry"], tokens: slice | Tensor, entries: slice) -> None:
        """Float32 logits of the head's product become what is sampled, before any entry falls, in place."""
        replay = self.replay
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if replay.seen is not None:
            assert isinstance(tokens, slice)
            places = replay.seen.places(tokens, entries)
            logits[places] = penalised(logits[places], replay.repetition_penalty)
        if replay.temperature != 1:
            logits.div_(replay.temperature)

    def scaled(self, product: Float[Tensor, "*shape"], seen: Bool[Tensor, "*shape"] | None) -> Float[Tensor, "*shape"]:
        """The same, differentiable, for any entries; `seen` says which of them are under the penalty."""
        logits = product.float() * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        replay = self.replay
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
