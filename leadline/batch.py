"""Groups -> Batch: the only place that lays out tokens.

After generation nothing is rectangular, so nothing is padded. A `Batch` has three flat axes: "token" (all completion
tokens of the step), "completion" and "group". `pack` lays out some of its completions as one row for the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.config import Config
from leadline.objective.advantages import group_advantages
from leadline.objective.segments import segment_sum
from leadline.types import Group, Rollout


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
class Row:
    """Some completions, each behind its prompt, side by side on one sequence axis.

    Positions restart at 0 with every prompt, from which transformers derives the block-diagonal attention mask.
    """

    completions: tuple[int, ...]
    lengths: list[int]
    """Tokens of each completion."""
    input_ids: Int[Tensor, "1 position"]
    position_ids: Int[Tensor, "1 position"]
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
        _lost_at(rollout, float(advantage), config.objective.mask_truncated)
        for rollout, advantage in zip(rollouts, advantages, strict=True)
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
    )


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The groups of one optimizer step."""

    forwarded: tuple[int, ...]
    num_loss_tokens: int
    """In the loss, those of completions that are not forwarded included."""


def minibatches(batch: Batch, parts: int) -> Iterator[Minibatch]:
    """The batch split into `parts` runs of equally many groups."""
    part_of_group = torch.arange(batch.num_groups) * parts // batch.num_groups
    part_of_completion = part_of_group[batch.group_of_completion]
    for part in range(parts):
        in_loss = batch.loss_mask & (part_of_completion == part)[batch.completion_of_token]
        yield Minibatch(
            forwarded=tuple(c for c in batch.forwarded if part_of_completion[c] == part),
            num_loss_tokens=int(in_loss.sum()),
        )


def micro_batches(batch: Batch, completions: Sequence[int], tokens_per_micro: int) -> Iterator[tuple[int, ...]]:
    """Runs of completions of at most `tokens_per_micro` tokens with their prompts (one, if it alone is longer)."""
    lengths = batch.lengths.tolist()
    micro: list[int] = []
    used = 0
    for completion in completions:
        tokens = len(batch.prompt_ids[int(batch.group_of_completion[completion])]) + lengths[completion]
        if micro and used + tokens > tokens_per_micro:
            yield tuple(micro)
            micro, used = [], 0
        micro.append(completion)
        used += tokens
    if micro:
        yield tuple(micro)


def pack(batch: Batch, completions: Sequence[int]) -> Row:
    """One row of these completions. The last token of each predicts nothing and is left out."""
    input_ids: list[Tensor] = []
    position_ids: list[Tensor] = []
    predicts: list[Tensor] = []
    start = 0
    token_ids = batch.token_ids[batch.tokens_of(completions)]
    lengths = batch.lengths[list(completions)].tolist()
    for piece, completion in zip(token_ids.split(lengths), completions, strict=True):
        prompt = batch.prompt_ids[int(batch.group_of_completion[completion])]
        sequence = torch.cat([prompt, piece[:-1]])
        input_ids.append(sequence)
        position_ids.append(torch.arange(len(sequence)))
        predicts.append(torch.arange(len(piece)) + start + len(prompt) - 1)
        start += len(sequence)
    return Row(
        completions=tuple(completions),
        lengths=lengths,
        input_ids=torch.cat(input_ids)[None],
        position_ids=torch.cat(position_ids)[None],
        predicts=torch.cat(predicts),
        token_ids=token_ids,
    )


def _lost_at(rollout: Rollout, advantage: float, mask_truncated: bool) -> str | None:
    if rollout.reward != rollout.reward:  # NaN: failed, or no reward
        return "failed"
    if advantage == 0:
        return "no_signal"
    if mask_truncated and rollout.completion.truncated:
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
