"""What a probe says: plain data, rendered by `report`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the function that its author should know.

    Example:
        Finding("error", "old_logprobs_shifted", "old_logprobs shifted by one", "Each ratio ...", "Align both ...")
    """

    level: Level
    """error: wrong, and the exit code is 1. note: right, as long as its caller sees to something."""
    name: str
    title: str
    consequence: str
    fix: str
    evidence: str = ""


def sentence(phrase: str) -> str:
    """With a capital, unless it begins with a name."""
    return phrase if "_" in phrase.split()[0] else phrase[0].upper() + phrase[1:]


@dataclass(frozen=True, slots=True)
class Report:
    """One function, examined."""

    target: str
    role: str
    place: str
    """File and line."""
    adaptation: Sequence[str]
    """How the function was called, sentence by sentence."""
    verdict: str
    findings: Sequence[Finding] = ()
    matches: str | None = None
    """The variant it matches, in its own name; None: none."""
    mutations: Sequence[str] = ()
    """Names of the mutations under which it matches."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What was measured, in words."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def exit_code(self) -> int:
        return 1 if self.errors else 0
