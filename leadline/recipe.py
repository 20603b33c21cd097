"""A recipe: a TOML file, and `--set section.field=value` on top of it."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadline.config import Config, parse_config
from leadline.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe at `path` with `section.field=value` overrides (values in TOML syntax, bare words are strings).

    Raises ConfigError: unreadable file, malformed TOML, unknown, ill-typed or contradictory setting.
    """
    return parse_config(recipe_values(path, overrides))


def recipe_values(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What the recipe says, overrides applied, not yet checked. Raises ConfigError: unreadable file, malformed TOML."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"The recipe is {str(path)!r}, but it cannot be read ({reason}). Nothing can be trained. "
            "Give the path of a .toml file, e.g. recipes/demo.toml."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"The recipe is {str(path)!r}, but it is not valid TOML: {error}. Nothing can be trained. Mend that line."
        ) from error
    for override in overrides:
        _apply_override(values, override)
    return values


def split_override(override: str) -> tuple[str, Any]:
    """Name and value of `section.field=value`. Raises ConfigError."""
    name, equals, raw = override.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"--set is {override!r}, but it has the form section.field=value. Nothing was set. "
            "Write e.g. --set run.steps=10."
        )
    return ".".join(parts), _toml_value(raw)


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, value = split_override(override)
    *sections, last = name.split(".")
    target: Any = values
    try:
        for part in sections:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        target[int(last) if isinstance(target, list) else last] = value
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"--set is {override!r}, but the recipe has no place of that name. Nothing was set. Name a section and "
            "its setting; entries of a list that the recipe has are counted from 0, e.g. --set rewards.0.weight=2."
        ) from error


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
