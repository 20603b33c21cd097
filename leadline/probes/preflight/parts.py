"""What a preflight looks at, and what it says when it cannot tell."""

from dataclasses import dataclass
from typing import Any

from leadline.config import Config
from leadline.data import PromptData
from leadline.models import Loaded, plain_model
from leadline.policy.memory import Forecast
from leadline.policy.policy import Policy
from leadline.rewards.scorer import Scorer
from leadline.types import Prompt

FIRST_PROMPTS = 16
"""How many prompts are looked at where it would take long to look at all."""


class Undecided(Exception):
    """A check has nothing to go by: it neither passed nor failed."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run before an engine is started and anything is written."""

    config: Config
    loaded: Loaded
    data: PromptData
    scorer: Scorer
    policy: Policy
    forecast: Forecast
    """Of the memory that the run will take."""

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @property
    def embedded(self) -> int:
        """How many token ids the model has a row for."""
        rows: int = plain_model(self.policy.model).get_input_embeddings().num_embeddings
        return rows

    @property
    def first_prompts(self) -> list[Prompt]:
        """The prompts that training begins with."""
        return [self.data.train.prompt(i) for i in range(min(FIRST_PROMPTS, len(self.data.train)))]
