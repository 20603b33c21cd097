"""What a completion is worth, and the text it is judged by."""

from typing import Any

from pydantic import Field

from leadline.settings.section import Section


class Reward(Section):
    """One component of the reward. The recipe lists them as `[[rewards]]`."""

    name: str
    """A built-in (`leadline train --help` lists them), `package.module:function`, `file.py:function`, or
    `model:DIRECTORY` for a sequence-classification reward model."""
    weight: float = 1.0
    """The rollout's reward is the weighted sum of its components."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the reward function."""
    label: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Name in the logs; None = the last part of `name`."""
    batched: bool | None = None
    """The function takes lists (prompts, completions, columns). None = decided by its parameter names."""
    timeout_s: float = Field(30.0, gt=0)
    """A call that takes longer is a failed rollout."""

    @property
    def resolved_label(self) -> str:
        return self.label or self.name.rsplit(":", 1)[-1].rstrip("/").rsplit("/", 1)[-1]


class Decoding(Section):
    """From token ids to the text that rewards score."""

    reasoning_open: str = "<think>"
    """Marker that opens the reasoning block."""
    reasoning_close: str = "</think>"
    """Marker that closes it: rewards see what follows the first one."""
    strip_reasoning: bool = True
    """False = rewards see the reasoning and its markers too."""
