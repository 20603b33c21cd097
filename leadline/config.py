"""A whole run: the sections of `leadline/settings/`, checked one by one and against each other.

Nothing here is ever ignored: an unknown setting, a value of another type, and two settings that contradict each other
raise `ConfigError`, one line per problem (in words: `config_problems.py`). `recipe.py` reads a run from a TOML file.
"""

import json
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from leadline.config_problems import contradictions, explained
from leadline.errors import ConfigError
from leadline.settings.data import Data
from leadline.settings.model import Model
from leadline.settings.objective import Objective
from leadline.settings.optimizer import Optimizer
from leadline.settings.reward import Decoding, Reward
from leadline.settings.rollout import EngineSettings, RolloutSettings, Sampling
from leadline.settings.run import Evaluation, Run
from leadline.settings.section import Section


class Config(Section):
    """A whole run."""

    model: Model
    data: Data
    rewards: tuple[Reward, ...] = Field(min_length=1, strict=False)
    sampling: Sampling = Sampling()
    decoding: Decoding = Decoding()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: Objective = Objective()
    optimizer: Optimizer = Optimizer()
    eval: Evaluation = Evaluation()
    run: Run = Run()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := contradictions(self):
            raise ValueError("\n".join(problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "data": Data,
    "rewards": Reward,
    "sampling": Sampling,
    "decoding": Decoding,
    "engine": EngineSettings,
    "rollout": RolloutSettings,
    "objective": Objective,
    "optimizer": Optimizer,
    "eval": Evaluation,
    "run": Run,
}


def parse_config(values: dict[str, Any]) -> Config:
    """A checked Config from plain values. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explained(error, SECTIONS)) from error


def dump_config(config: Section) -> str:
    """The resolved config as JSON, which keeps nulls."""
    return json.dumps(config.model_dump(mode="json"), indent=2)
