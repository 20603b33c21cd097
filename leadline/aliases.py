"""What TRL, verl and others call our settings."""

from typing import Any

IMPORTANCE_ALIASES: dict[str, tuple[str, str]] = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
    "geometric_truncate": ("geometric", "truncate"),
    "geometric_mask": ("geometric", "mask"),
    "tis": ("token", "truncate"),
    "icepop": ("token", "mask"),
}
"""For `objective.importance_action`: (level, action)."""


def with_importance_alias(values: Any) -> Any:
    """The settings of [objective] with level and action set by an alias. Raises ValueError: another level is set too."""
    alias = values.get("importance_action") if isinstance(values, dict) else None
    if not isinstance(alias, str) or alias not in IMPORTANCE_ALIASES:
        return values
    level, action = IMPORTANCE_ALIASES[alias]
    if values.get("importance_level", level) != level:
        raise ValueError(
            f"objective.importance_action is {alias!r}, but importance_level is {values['importance_level']!r}. "
            f"The name fixes the level to {level!r}. Remove importance_level."
        )
    return {**values, "importance_level": level, "importance_action": action}
