"""What the doctor says about one run: plain data, which `reports/` turns into text, JSON, Markdown, HTML and SARIF."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from leadline.doctor.rule import Finding

Verdict = Literal["healthy", "fault", "undecided"]


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the signal budget, as bounds: equal when it is known exactly, None when nothing is known.

    Example: Factor("importance weight", low=1.3e-8, high=1.3e-8, source="importance/weight_mean", dead=True)
    """

    name: str
    low: float | None
    high: float | None
    source: str = ""
    """The quantity or setting it was read from, or why it is not known."""
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """update = advantages x importance weight x tokens kept x clip pass x finite x learning rate."""

    factors: tuple[Factor, ...]
    first: int
    last: int
    note: str = ""

    @property
    def dead(self) -> tuple[Factor, ...]:
        """Where the update dies or starves."""
        return tuple(factor for factor in self.factors if factor.dead)


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A cause that looks the same and is not it. Example: RuledOut("LL101", "zero-...", "All rewards ...", fact="...")"""

    rule: str
    name: str
    title: str
    fact: str


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not be asked, and what would let it: the option of that framework."""

    rule: str
    name: str
    title: str
    missing: tuple[str, ...]
    """What it needs: canonical quantities or settings."""
    enable: str = ""
    """How this framework logs it; empty if it cannot."""
    broke: str = ""
    """Set if the check itself failed: the error."""


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's whole answer about one run."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    """Most likely first."""
    budget: Budget | None = None
    ruled_out: tuple[RuledOut, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """What kind of run it is, e.g. {"framework": "trl", "steps": "10 to 70", "loss": "grpo"}."""
    source: str = ""
    framework: str = "leadline"
    notes: tuple[str, ...] = ()
    """What the readers did to the log: duplicated rows, overlapping steps, a half-written line, several runs."""
