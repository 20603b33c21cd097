"""Where a run's stream of groups goes on: with the policy, all that a resumed run needs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from leadline.types import Group

_GROUPS = TypeAdapter(tuple[Group, ...])


@dataclass(frozen=True, slots=True)
class Place:
    """Example: Place(position=40, ahead=(43, 44)): prompts 0 to 39 are trained, and two that refills drew."""

    position: int = 0
    """Index of the oldest prompt that was not handed to training."""
    ahead: tuple[int, ...] = ()
    """Later prompts that were."""
    replay: tuple[Group, ...] = ()
    """What the replay buffer holds."""

    def to_json(self) -> str:
        """All of it, logprobs to the last digit; of prompts without the columns, which only rewards need."""
        bare = [replace(group, prompt=replace(group.prompt, columns={})) for group in self.replay]
        return json.dumps({"position": self.position, "ahead": self.ahead, "replay": [asdict(group) for group in bare]})

    @classmethod
    def from_json(cls, text: str) -> "Place":
        """What `to_json` wrote. A checkpoint from before there was a part has it empty."""
        values: Mapping[str, Any] = json.loads(text)
        groups: Sequence[Any] = values.get("replay", ())
        return cls(values["position"], tuple(values.get("ahead", ())), _GROUPS.validate_python(groups))
