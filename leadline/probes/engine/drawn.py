"""The nouns of the engine probe: tokens that an engine drew, and what engine and trainer say of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leadline.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class Drawn:
    """Completions with the engine's logprobs. Per-token tensors are flat, in the order of `completions`.

    Example:
        Drawn(prompts=((1, 5), (1, 7)), completions=((9, 2), (4,)), engine=tensor([-0.3, -1.2, -0.8]))
    """

    prompts: tuple[tuple[int, ...], ...]
    """By completion; empty tuples where the source does not say."""
    completions: tuple[tuple[int, ...], ...]
    engine: Tensor
    """log mu by token, in nats; NaN = the engine did not score it."""
    trainer: Tensor | None = None
    """What a trainer recorded for the same tokens, where the source has it."""
    entropies: Tensor | None = None
    """The trainer's, in nats, where the source has them."""
    ages: Tensor | None = None
    """Steps between the weights that drew a token and those that scored it, where the source has them."""

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(completion) for completion in self.completions])

    @property
    def owner(self) -> Tensor:
        """By token: its completion."""
        return torch.repeat_interleave(torch.arange(len(self.completions)), self.lengths)

    @property
    def positions(self) -> Tensor:
        """By token: its place in its completion, from 0."""
        return torch.cat([torch.arange(len(completion)) for completion in self.completions])

    def first(self, tokens: int) -> "Drawn":
        """The first completions that hold so many tokens together (all of them, if they hold fewer)."""
        kept = min(len(self.completions), int((self.lengths.cumsum(0) < tokens).sum()) + 1)
        return self._cut(kept, int(self.lengths.max()))

    def shortened(self, length: int) -> "Drawn":
        """The first `length` tokens of each completion."""
        return self._cut(len(self.completions), length)

    def _cut(self, completions: int, length: int) -> "Drawn":
        inside = (self.positions < length) & (self.owner < completions)

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[inside]

        return replace(
            self,
            prompts=self.prompts[:completions],
            completions=tuple(completion[:length] for completion in self.completions[:completions]),
            engine=self.engine[inside],
            trainer=cut(self.trainer),
            entropies=cut(self.entropies),
            ages=cut(self.ages),
        )


def drawn_from(pairs: Sequence[tuple[Prompt, Completion]]) -> Drawn:
    """The completions of an engine that are not empty."""
    kept = [(prompt, completion) for prompt, completion in pairs if completion.token_ids]
    return Drawn(
        prompts=tuple(prompt.token_ids for prompt, _ in kept),
        completions=tuple(completion.token_ids for _, completion in kept),
        engine=torch.tensor([value for _, completion in kept for value in completion.logprobs], dtype=torch.float64),
    )
