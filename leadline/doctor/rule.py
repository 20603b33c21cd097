"""What a rule is, and what it hands over: evidence, which is data, and findings, which are evidence in words."""

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from leadline.doctor.evidence import PERSISTENT, TREND, Evidence, Strength, number, percent, when
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View

__all__ = [
    "PERSISTENT",
    "TREND",
    "Evidence",
    "Finding",
    "Need",
    "Rule",
    "Severity",
    "Strength",
    "alternatives",
    "message",
    "number",
    "percent",
    "when",
]

Severity = Literal["error", "warning"]
Need = str | tuple[str, ...]
"""A quantity, or several of which one is enough."""

NOTES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a run, in words, with the evidence and the remedy. JSON-able through `to_dict`."""

    rule: str
    """Its id, e.g. LL301."""
    name: str
    severity: Severity
    title: str
    message: str
    fix: str
    evidence: tuple[Evidence, ...]
    step: int
    """Since when."""
    confidence: str = ""
    """A word of `confidence.WORDS`."""
    against: tuple[Evidence, ...] = ()
    """What speaks against it."""
    rivals: tuple[str, ...] = ()
    """Names of causes that look the same and are not ruled out, with the fact that keeps them behind."""
    consequences: tuple[str, ...] = ()
    """Names of rules that fire because of this one: they are no findings of their own."""
    avoid: str = ""
    """What would make it worse."""
    confirm: str = ""
    """The measurement that would decide, where the log does not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The finding that `to_dict` came from."""
        lists = {key: tuple(values.get(key, ())) for key in ("rivals", "consequences")}
        facts = {key: tuple(Evidence(**item) for item in values.get(key, ())) for key in ("evidence", "against")}
        return cls(**{**values, **lists, **facts})


class Rule(ABC):
    """One fault. The class docstring is its page: a title line, then Symptom, Cause, Fix and References."""

    id: ClassVar[str]
    """LL, the digit of the stage, two more: never changed, never used again.
    Stages: 1 prompts and rewards, 2 generation, 3 importance and staleness, 4 loss and optimizer, 5 evaluation,
    6 system. Rules are asked in the order of ids, because an upstream defect explains those downstream."""
    name: ClassVar[str]
    """The defect, never the remedy."""
    severity: ClassVar[Severity]
    needs: ClassVar[tuple[Need, ...]] = ()
    """Quantities without which the log says nothing about it; none = settings or measurements show it."""
    explains: ClassVar[tuple[str, ...]] = ()
    """Names of the rules that fire as its consequence."""
    confirm: ClassVar[str] = ""
    """What to measure where the log alone does not decide."""
    sick: ClassVar[tuple[RunLog, ...]]
    """Runs on which it fires."""
    healthy: ClassVar[tuple[RunLog, ...]]
    """Runs on which it stays silent, the near misses among them."""

    @abstractmethod
    def examine(self, run: View) -> list[Evidence]:
        """What the log holds for it, in the order of steps; empty if there is nothing."""

    def measure(self, run: View) -> list[Evidence]:
        """What measurements under free names hold for it, whether or not its needs were logged."""
        return []

    def lint(self, run: View) -> list[Evidence]:
        """What the settings alone hold for it."""
        return []

    def against(self, run: View) -> list[Evidence]:
        """What makes it less likely, though it may be."""
        return []

    def forbids(self, run: View) -> list[Evidence]:
        """What cannot be if it is the cause: one such fact rules it out."""
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        """What to change, in one paragraph. A rule whose remedy depends on the evidence overrides it."""
        return run.worded(" ".join(self.section("Fix").split()))

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        """What would make it worse; empty if nothing obvious would."""
        return ""

    @property
    def title(self) -> str:
        return _page(type(self)).splitlines()[0]

    def section(self, heading: str) -> str:
        """The text under `## heading` of the page; KeyError if there is none."""
        sections = re.split(r"^## (.+)\n", _page(type(self)), flags=re.MULTILINE)
        return dict(zip(sections[1::2], sections[2::2], strict=True))[heading].strip()


def alternatives(need: Need) -> tuple[str, ...]:
    """The quantities of which any one will do."""
    return (need,) if isinstance(need, str) else need


def message(evidence: Sequence[Evidence]) -> str:
    """The first notes as one text."""
    notes = [item.note for item in evidence[:NOTES_SHOWN]]
    rest = len(evidence) - len(notes)
    return " ".join([*notes, f"And {rest} more."] if rest else notes)


def _page(rule: type[Rule]) -> str:
    return inspect.cleandoc(rule.__doc__ or "")
