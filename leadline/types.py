"""The nouns. Plain data without torch; tensors begin in `policy/batch.py`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why a completion ended, as the engine said. Never inferred from ids or lengths."""

    EOS = "eos"
    """One of the model's end-of-sequence tokens, which is the last token of the completion."""
    STOP = "stop"
    """A stop string or a stop token of the sampling settings: a normal end."""
    LENGTH = "length"
    """The token limit was reached: the only reason that means truncation."""
    ABORT = "abort"
    """The engine gave up (shut down, cancelled): the rollout is failed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sampled from.

    Example:
        Prompt(index=17, text="<|im_start|>user\\n2 + 3?<|im_end|>\\n<|im_start|>assistant\\n",
               token_ids=(1, 4093, 198, ...), columns={"answer": "5"})
    """

    index: int
    """Position in the endless stream: unique in a run, and the seed of its completions."""
    text: str
    """The rendered prompt, chat template applied."""
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the dataset row, handed to rewards by name."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one draw.

    Example:
        Completion(token_ids=(37, 2), logprobs=(-0.31, -0.02), policy_versions=(4, 4), finish_reason=FinishReason.EOS)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log mu of each token under the distribution it was drawn from, in nats. NaN = the engine did not score it."""
    policy_versions: tuple[int, ...]
    """The number of steps that the sampling weights had seen, for each token."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs) == len(self.policy_versions), (
            f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs, {len(self.policy_versions)} versions"
        )

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its reward.

    Example:
        Rollout(completion, text="5", rewards={"exact_match": 1.0, "brevity": 0.2}, reward=1.2)
    """

    completion: Completion
    text: str
    """What the rewards scored (see `decoding.py`)."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By component, before weights; None = this reward had nothing to say."""
    reward: float = math.nan
    """Weighted sum of the components; NaN = no reward, the rollout leaves the baseline and is not trained."""
    error: str | None = None
    """What failed, for a rollout that is failed (reward raised or timed out, engine aborted)."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: generate, reward."""
    replayed: bool = False
    """Trained by an earlier step, and kept to stand in for a group without signal."""

    @property
    def policy_version(self) -> int | None:
        """The oldest version among the group's tokens; None if there are none."""
        return min((v for r in self.rollouts for v in r.completion.policy_versions), default=None)


Weights = Mapping[str, Any]
"""Parameter name (as `model.state_dict()` of the Hugging Face model) -> torch.Tensor."""
