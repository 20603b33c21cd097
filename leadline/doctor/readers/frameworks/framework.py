"""What a reader must know of one framework: its names, and where its numbers mean something else than ours."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """Where a logged key goes.

    Example: Key("rollout/truncated_fraction", factor=-1, offset=1) for a logged share of completions that stopped.
    """

    name: str
    """Canonical quantity; in a pattern, `{0}`, `{1}` ... stand for its groups."""
    caveat: str = ""
    """How the number differs from the quantity's meaning."""
    factor: float = 1.0
    offset: float = 0.0
    """Canonical value = factor x logged value + offset."""
    placeholder: float | None = None
    """The number that is written when nothing was computed."""


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework's names. Tables are literal: a key that is not in them has no canonical meaning."""

    name: str
    words: tuple[str, ...]
    """Names under which the framework, or what is built on it, goes in a config or a description."""
    keys: Mapping[str, str | Key]
    """Logged key -> where it goes. Of two keys that go to the same place, the first in the table wins."""
    patterns: tuple[tuple[str, str | Key], ...] = ()
    """The same for families of keys, as regular expressions that match the whole key."""
    steps: tuple[str, ...] = ("step",)
    """Keys that number the rows, best first."""
    prefixes: tuple[str, ...] = ()
    """What trackers put in front of every key."""
    marks: tuple[str, ...] = ()
    """Regular expressions that only this framework's console lines match."""
    console: Callable[[Iterator[str]], Iterator[Row]] | None = None
    """Rows of a console log; lines come without colours and Ray prefixes."""
    refine: Callable[[frozenset[str], Callable[[str], Any]], Mapping[str, str | Key]] | None = None
    """From the keys of a log and a way to read their values: entries of `keys` that are different in this log."""
    could_log: Mapping[str, str] = field(default_factory=dict)
    """Canonical quantity -> the option that turns it on."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Canonical setting -> option."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of options -> canonical setting."""
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Canonical settings that follow from options jointly or in other words."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of keys that are bookkeeping: neither understood nor missed."""

    def find(self, key: str) -> Key | None:
        """Where a key goes; None if it has no canonical meaning."""
        for name in self._spellings(key):
            found = self.keys.get(name)
            if found is not None:
                return found if isinstance(found, Key) else Key(found)
            for pattern, target in self.patterns:
                match = re.fullmatch(pattern, name)
                if match:
                    return _filled(target, match)
        return None

    def _spellings(self, key: str) -> list[str]:
        return [key, *(key[len(prefix) :] for prefix in self.prefixes if key.startswith(prefix))]


def _filled(target: str | Key, match: re.Match[str]) -> Key:
    key = target if isinstance(target, Key) else Key(target)
    groups = [(group or "").replace("/", "_") for group in match.groups()]
    return Key(key.name.format(*groups), key.caveat, key.factor, key.offset, key.placeholder)
