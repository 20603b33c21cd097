"""What could have been set otherwise: single changes to the settings of a step."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.aliases import IMPORTANCE_ALIASES
from leadline.config import Config, parse_config
from leadline.errors import ConfigError
from leadline.recipe import split_override

TOKEN_LEVEL = re.compile(r"objective\.(?!overlong)\w+")
"""Settings that act after the logprobs are known. An overlong penalty is part of the recorded rewards."""
MODEL_LEVEL = re.compile(r"model\.(dtype|attention)|sampling\.(temperature|top_p|top_k|min_p|repetition_penalty)")
"""Settings that change what the policy says of the recorded tokens."""

CORRECTIONS = (
    "token_truncate",
    "token_mask",
    "geometric_truncate",
    "geometric_mask",
    "sequence_truncate",
    "sequence_mask",
    "off",
)
"""Values of objective.importance_action, those that lose least to a long completion first."""


@dataclass(frozen=True, slots=True)
class Change:
    """Settings by name, with other values than the step had.

    Example: Change({"objective.importance_action": "token_truncate"})
    """

    settings: Mapping[str, Any]

    @property
    def rescores(self) -> bool:
        """Whether the recorded logprobs no longer hold."""
        return any(MODEL_LEVEL.fullmatch(name) for name in self.settings)

    def config(self, config: Config) -> Config:
        """The step's settings with the change. Raises ConfigError: it contradicts others."""
        values = config.model_dump()
        for name, value in self.settings.items():
            section, field = name.split(".")
            if name == "objective.importance_action" and value in IMPORTANCE_ALIASES:
                values["objective"].pop("importance_level", None)  # the alias sets it
            values[section][field] = value
        return parse_config(values)

    def __str__(self) -> str:
        if list(self.settings) == ["objective.importance_action"]:
            action = str(self.settings["objective.importance_action"])
            return "no correction" if action == "off" else action
        return ", ".join(f"{name.partition('.')[2]} = {_shown(value)}" for name, value in self.settings.items())

    @property
    def as_settings(self) -> str:
        """As a recipe would say it."""
        return " and ".join(f"{name} = {json.dumps(value)}" for name, value in self.settings.items())


def asked_change(overrides: Sequence[str]) -> Change:
    """All `--set section.field=value` together. Raises ConfigError: a setting that a replay cannot change."""
    settings = {}
    for override in overrides:
        name, value = split_override(override)
        if not (TOKEN_LEVEL.fullmatch(name) or MODEL_LEVEL.fullmatch(name)):
            raise ConfigError(
                f"--set is {override!r}, but a replay has the rollouts and rewards that were recorded. It would change "
                "nothing. Set one of objective.* (but the overlong penalty), model.dtype, model.attention, or of sampling "
                "the temperature, top_p, top_k, min_p or repetition_penalty."
            )
        settings[name] = value
    return Change(settings)


def usual_changes(config: Config) -> list[Change]:
    """Every correction, each mask and the KL term off, other bounds of the ratios, full precision; none is as it was."""
    changes = [Change(settings) for settings in (*_corrections(), *_terms_off(config), *_bounds(config))]
    if config.model.dtype != "float32":
        changes.append(Change({"model.dtype": "float32"}))
    return [change for change in changes if change.config(config) != config]


def _corrections() -> Iterator[dict[str, Any]]:
    for action in CORRECTIONS:
        yield {"objective.importance_action": action}


def _terms_off(config: Config) -> Iterator[dict[str, Any]]:
    """What masks tokens or pulls against the reward, without it."""
    off = {
        "importance_veto": 0.0,
        "entropy_quantile": 0.0,
        "mask_truncated": False,
        "on_unscored": "on_policy",
        "beta": 0.0,
        "entropy_bonus": 0.0,
    }
    for name, value in off.items():
        if getattr(config.objective, name) != value:
            yield {f"objective.{name}": value}


def _bounds(config: Config) -> Iterator[dict[str, Any]]:
    objective = config.objective
    for high in (2.0, 10.0):
        if high > objective.importance_low:
            yield {"objective.importance_high": high}
    yield {"objective.importance_low": 0.0}
    if objective.loss != "reinforce":
        yield {"objective.clip_low": 0.2, "objective.clip_high": 0.28}
        yield {"objective.clip_low": 0.999, "objective.clip_high": 1000.0}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
