"""What a rule is, and what it hands over: evidence, which is data, and findings, which are evidence in words."""

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from leadline.doctor.run_log import RunLog, Streak

Severity = Literal["error", "warning"]

PERSISTENT = 3
"""Logged steps in a row after which a fluctuating quantity counts as out of its band: one odd step is not a fault."""

NOTES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact that a rule holds against a run.

    Example: Evidence("kl/k3", step=4, value=3.2, limit=1.0, note="The KL ... was 3.2 at step 4; 1 is the limit.")
    """

    metric: str
    step: int
    value: float
    limit: float
    note: str
    """The same in one plain sentence, numbers included."""


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The finding that `to_dict` came from."""
        return cls(**{**values, "evidence": tuple(Evidence(**item) for item in values["evidence"])})


class Rule(ABC):
    """One fault. The class docstring is its page: a title line, then Symptom, Cause, Fix and References."""

    id: ClassVar[str]
    """LL, the digit of the stage, two more: never changed, never used again.
    Stages: 1 prompts and rewards, 2 generation, 3 importance and staleness, 4 loss and optimizer, 5 evaluation,
    6 system. Rules are asked in the order of ids, because an upstream defect explains those downstream."""
    name: ClassVar[str]
    """The defect, never the remedy."""
    severity: ClassVar[Severity]
    needs: ClassVar[tuple[str, ...]]
    """Quantities without which the rule cannot be checked."""
    sick: ClassVar[tuple[RunLog, ...]]
    """Runs on which it fires."""
    healthy: ClassVar[tuple[RunLog, ...]]
    """Runs on which it stays silent, the near misses among them."""

    @abstractmethod
    def examine(self, run: RunLog) -> list[Evidence]:
        """The evidence, in the order of steps; empty if there is none."""

    @property
    def title(self) -> str:
        return _page(type(self)).splitlines()[0]

    def section(self, heading: str) -> str:
        """The text under `## heading` of the page; KeyError if there is none."""
        sections = re.split(r"^## (.+)\n", _page(type(self)), flags=re.MULTILINE)
        return dict(zip(sections[1::2], sections[2::2], strict=True))[heading].strip()

    def fix(self, run: RunLog, evidence: Sequence[Evidence]) -> str:
        """What to change, in one paragraph. A rule whose remedy depends on the evidence overrides it."""
        return " ".join(self.section("Fix").split())

    def finding(self, run: RunLog, evidence: Sequence[Evidence]) -> Finding:
        """The evidence (at least one) in words."""
        notes = [item.note for item in evidence[:NOTES_SHOWN]]
        rest = len(evidence) - len(notes)
        message = " ".join([*notes, f"And {rest} more."] if rest else notes)
        return Finding(
            rule=self.id,
            name=self.name,
            severity=self.severity,
            title=self.title,
            message=message,
            fix=self.fix(run, evidence),
            evidence=tuple(evidence),
            step=evidence[0].step,
        )


def _page(rule: type[Rule]) -> str:
    return inspect.cleandoc(rule.__doc__ or "")


def when(streak: Streak) -> str:
    """`at step 12`, or `at step 12 and the 4 before`: true also of a streak that began before the rows at hand."""
    if streak.length == 1:
        return f"at step {streak.last}"
    return f"at step {streak.last} and the {streak.length - 1} before"


def percent(share: float) -> str:
    """`97 %`; one decimal below 10 %, so that a small share is not printed as nothing."""
    return f"{share:.0%}".replace("%", " %") if abs(share) >= 0.1 else f"{share:.1%}".replace("%", " %")
