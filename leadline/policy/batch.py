"""Groups -> Batch: the only place that lays out tokens.

After generation nothing is rectangular, so nothing is padded. A `Batch` has three flat axes: "token" (all completion
tokens of the step), "completion" and "group". `pack` lays out some of its completions as one row for the model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.config import Config
from leadline.objective.advantages import group_advantages
from leadline.objective.segments import segment_sum
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on.

    Example: two groups of two completions with 3, 0, 2 and 4 tokens
        completion_of_token = [0 0 0 2 2 3 3 3 3], group_of_completion = [0 0 1 1]
    """

    token_ids: Int[Tensor, " token"]
    completion_of_token: Int[Tensor, " token"]
    rollout_logprobs: Float[Tensor, " token"]
    """log mu; NaN = unscored."""
    staleness: Int[Tensor, " token"]
    """Policy version of this step less the version that sampled the token."""
    loss_mask: Bool[Tensor, " token"]
    """True = in the loss and its denominators, a zero advantage included."""
    group_of_completion: Int[Tensor, " completion"]
    rewards: Float[Tensor, " completion"]
    advantages: Float[Tensor, " completion"]
    lost_at: tuple[str | None, ...]
    """By completion: the ledger stage that took all of it before the loss (failed, no_signal, truncated), or None."""
    prompt_ids: tuple[Int[Tensor, " prompt_token"], ...]
    """By group."""
    forwarded: tuple[int, ...]
    """The completions that the model must see: all others have no gradient."""
    replayed: frozenset[int] = frozenset()
    """The groups that an earlier step has trained already."""

    @property
    def num_completions(self) -> int:
        return len(self.lost_at)

    @property
    def num_groups(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Int[Tensor, " completion"]:
        return torch.bincount(self.completion_of_token, minlength=self.num_completions)

    @property
    def num_loss_completions(self) -> int:
        """Completions with at least one token in the loss."""
        return len(self.completion_of_token[self.loss_mask].unique())

    def token_advantages(self) -> Float[Tensor, " token"]:
        return self.advantages[self.completion_of_token]

    def tokens_of(self, completions: Sequence[int]) -> Int[Tensor, " selected"]:
        """Indices into the token axis of the tokens of these completions, in their order."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        parts = [torch.arange(int(starts[c]), int(starts[c] + self.lengths[c])) for c in completions]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Span:
    """One prompt in a row and the completions that continue it: (start, stop) of each, along the row."""

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Some completions on one sequence axis, behind one copy of their group's prompt.

    Positions restart at 0 with every prompt, and at the prompt's length with every completion. What attends to what is
    in `attention.py`.

    Example: two completions of 4 and 3 tokens behind a prompt of 4 (the last token of each predicts nothing)
        positions 0 1 2 3 | 4 5 6 | 4 5, spans (Span((0, 4), ((4, 7), (7, 9))),), predicts 3 4 5 6 | 3 7 8
    """

    completions: tuple[int, ...]
    lengths: list[int]
    """Tokens of each completion."""
    input_ids: Int[Tensor, "1 position"]
    position_ids: Int[Tensor, "1 position"]
    spans: tuple[Span, ...]
    predicts: Int[Tensor, " selected"]
    """The position whose hidden state predicts each completion token: the only place where the shift by one happens."""
    token_ids: Int[Tensor, " selected"]
    """Those tokens."""

    def pieces(self) -> list[Int[Tensor, " completion_token"]]:
        """`token_ids` by completion."""
        return list(self.token_ids.split(self.lengths))


def build_batch(
    groups: Sequence[Group], config: Config, policy_version: int, *, replaced: frozenset[int] = frozenset()
) -> Batch:
    """The groups as flat tensors. `replaced` are groups that a refill stands in for: sampled, but not in the loss."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    group_of_completion = torch.tensor([g for g, group in enumerate(groups) for _ in group.rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
    advantages = group_advantages(
        rewards,
        group_of_completion,
        scaling=config.objective.advantage_scaling,
        epsilon=config.objective.advantage_epsilon,
    )
    lost_at = tuple(
        _lost_at(completion, reward, advantage, config.objective.mask_truncated)
        for completion, reward, advantage in zip(completions, rewards.tolist(), advantages.tolist(), strict=True)
    )
    completion_of_token = _flat([[i] * len(c.token_ids) for i, c in enumerate(completions)], torch.long)
    rollout_logprobs = _flat([c.logprobs for c in completions], torch.float32)
    in_loss = torch.tensor(
        [
            lost in (None, "no_signal") and g not in replaced
            for lost, g in zip(lost_at, group_of_completion.tolist(), strict=True)
        ]
    )
    loss_mask = in_loss[completion_of_token]
    if config.objective.on_unscored == "drop":
        loss_mask = loss_mask & ~rollout_logprobs.isnan()
    return Batch(
        token_ids=_flat([c.token_ids for c in completions], torch.long),
        completion_of_token=completion_of_token,
        rollout_logprobs=rollout_logprobs,
        staleness=policy_version - _flat([c.policy_versions for c in completions], torch.long),
        loss_mask=loss_mask,
        group_of_completion=group_of_completion,
        rewards=rewards,
        advantages=advantages,
        lost_at=lost_at,
        prompt_ids=tuple(torch.tensor(group.prompt.token_ids) for group in groups),
        forwarded=_forwarded(loss_mask, completion_of_token, lost_at, config),
        replayed=frozenset(g for g, group in enumerate(groups) if group.replayed),
    )


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The groups of one optimizer step."""

    forwarded: tuple[int, ...]
    num_loss_tokens: int
    """In the loss, those of completions that are not forwarded included."""


def minibatches(batch: Batch, parts: int) -> Iterator[Minibatch]:
    """The batch split into `parts` runs of equally many groups, counting those with a token in the loss."""
    present = torch.zeros(batch.num_groups, dtype=torch.bool)
    present[batch.group_of_completion[batch.completion_of_token[batch.loss_mask]]] = True
    part_of_group = (present.cumsum(0) - 1) * parts // max(1, int(present.sum()))
    part_of_completion = part_of_group[batch.group_of_completion]
    for part in range(parts):
        in_loss = batch.loss_mask & (part_of_completion == part)[batch.completion_of_token]
        yield Minibatch(
            forwarded=tuple(c for c in batch.forwarded if part_of_completion[c] == part),
            num_loss_tokens=int(in_loss.sum()),
        )


def micro_batches(batch: Batch, completions: Sequence[int], tokens_per_micro: int) -> Iterator[tuple[int, ...]]:
    """The completions in parts of at most `tokens_per_micro` tokens, each group's prompt counted once per part.

    As few parts as that takes with groups whole, of about equal size: the largest part is what memory must hold. A group
    that alone is too large is cut, and its prompt repeated; a completion that alone is too long is a part of its own.
    """
    lengths = batch.lengths.tolist()
    pieces: list[tuple[int, list[int]]] = []
    for group, members in groupby(completions, key=lambda c: int(batch.group_of_completion[c])):
        pieces += _pieces(list(members), lengths, len(batch.prompt_ids[group]), tokens_per_micro)
    pieces.sort(key=lambda piece: -piece[0])
    count = max(1, -(-sum(size for size, _ in pieces) // tokens_per_micro))
    while (parts := _even_parts(pieces, count, tokens_per_micro)) is None:
        count += 1
    yield from (tuple(sorted(part)) for part in sorted(parts) if part)


def _pieces(
    completions: Sequence[int], lengths: Sequence[int], prompt: int, limit: int
) -> Iterator[tuple[int, list[int]]]:
    """A group in as few runs of at most `limit` tokens, its prompt included, as there can be: (tokens, completions)."""
    piece: list[int] = []
    size = prompt
    for completion in completions:
        if piece and size + lengths[completion] > limit:
            yield size, piece
            piece, size = [], prompt
        piece.append(completion)
        size += lengths[completion]
    if piece:
        yield size, piece


def _even_parts(pieces: Sequence[tuple[int, list[int]]], count: int, limit: int) -> list[list[int]] | None:
    """Each piece, the largest first, into the part with the least; None if one then has too much in company."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for size, piece in pieces:
        least = sizes.index(min(sizes))
        if parts[least] and sizes[least] + size > limit:
            return None
        parts[least] += piece
        sizes[least] += size
    return parts


def pack(batch: Batch, completions: Sequence[int]) -> Row:
    """One row of these completions; neighbours of one group share its prompt.

    The last token of a completion predicts nothing and is left out. The prompt's last token predicts the first token of
    each of its completions.
    """
    row = _RowBuilder()
    token_ids = batch.token_ids[batch.tokens_of(completions)]
    lengths = batch.lengths[list(completions)].tolist()
    owned = zip((int(batch.group_of_completion[c]) for c in completions), token_ids.split(lengths), strict=True)
    for group, members in groupby(owned, key=lambda pair: pair[0]):
        row.add_group(batch.prompt_ids[group], [piece for _, piece in members])
    return Row(
        completions=tuple(completions),
        lengths=lengths,
        input_ids=torch.cat(row.input_ids)[None],
        position_ids=torch.cat(row.position_ids)[None],
        spans=tuple(row.spans),
        predicts=torch.cat(row.predicts),
        token_ids=token_ids,
    )


@dataclass(slots=True)
class _RowBuilder:
    """A row that grows group by group."""

    input_ids: list[Tensor] = field(default_factory=list)
    position_ids: list[Tensor] = field(default_factory=list)
    predicts: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    length: int = 0

    def add_group(self, prompt: Tensor, completions: Sequence[Tensor]) -> None:
        prompt_start, prompt_stop = self._add(prompt, first_position=0)
        spans = []
        for completion in completions:
            start, stop = self._add(completion[:-1], first_position=len(prompt))
            spans.append((start, stop))
            predicts = torch.cat([torch.tensor([prompt_stop - 1]), torch.arange(start, stop)])
            self.predicts.append(predicts[: len(completion)])  # none for an empty completion
        self.spans.append(Span((prompt_start, prompt_stop), tuple(spans)))

    def _add(self, ids: Tensor, first_position: int) -> tuple[int, int]:
        start, self.length = self.length, self.length + len(ids)
        self.input_ids.append(ids)
        self.position_ids.append(torch.arange(len(ids)) + first_position)
        return start, self.length


def _lost_at(completion: Completion, reward: float, advantage: float, mask_truncated: bool) -> str | None:
    if not math.isfinite(reward):  # NaN: failed, or no reward; infinite: none either, see `group_advantages`
        return "failed"
    if advantage == 0:
        return "no_signal"
    if mask_truncated and completion.truncated:
        return "truncated"
    return None


def _forwarded(
    loss_mask: Bool[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    lost_at: Sequence[str | None],
    config: Config,
) -> tuple[int, ...]:
    """A completion without advantage has a gradient only through the KL term or the entropy bonus."""
    loss_tokens = segment_sum(loss_mask.float(), completion_of_token, len(lost_at))
    needs_all = config.objective.beta > 0 or config.objective.entropy_bonus != 0
    return tuple(c for c, lost in enumerate(lost_at) if loss_tokens[c] > 0 and (lost is None or needs_all))


def _flat(pieces: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for piece in pieces for value in piece], dtype=dtype)


def probe_batch(vocab_size: int, config: Config) -> Batch:
    """Two groups of three completions of random tokens, all of them forwarded: to compare two ways of scoring."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (count,), generator=draw).tolist())

    def rollout(length: int, reward: float) -> Rollout:
        return Rollout(Completion(ids(length), (0.0,) * length, (0,) * length, FinishReason.EOS), "", reward=reward)

    groups = [
        Group(Prompt(0, "", ids(9)), [rollout(7, 0.0), rollout(1, 1.0), rollout(12, 2.5)]),
        Group(Prompt(1, "", ids(4)), [rollout(5, 1.0), rollout(8, 0.0), rollout(3, 3.0)]),
    ]
    return build_batch(groups, config, 0)
