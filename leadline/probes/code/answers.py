"""Stands in for a config, or for the dict of a batch: gives what a function asks for by its usual name."""

from collections.abc import Callable, Iterator
from typing import Any

from leadline.probes.code.words import CHOICES, PASSED, SETTINGS, quantity_of


class Answers:
    """`answers.clip_ratio`, `answers["old_log_probs"]` and `answers.get("beta")` are what the names mean.

    Raises AttributeError or KeyError for a name that means nothing known; `get` gives its default.
    """

    def __init__(self, quantity: Callable[[str], Any]) -> None:
        self._quantity = quantity

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error)) from error

    def __getitem__(self, name: str) -> Any:
        meant = quantity_of(name, "loss")
        if meant is None or meant == "config":
            raise KeyError(f"{name}, which the function asks its config or batch for, means nothing known")
        return PASSED[meant] if meant in SETTINGS or meant in CHOICES else self._quantity(meant)

    def __contains__(self, name: str) -> bool:
        return quantity_of(name, "loss") is not None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default for a name that is unknown or not set."""
        try:
            value = self[name]
        except KeyError:
            return default
        return default if value is None else value
