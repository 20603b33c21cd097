"""Evidence is data: a metric, a step, a value, a limit, and the same in one sentence."""

import math
from dataclasses import dataclass
from typing import Literal

from leadline.doctor.run_log import Streak

Strength = Literal["proof", "strong", "weak"]

PERSISTENT = 3
"""Logged steps in a row after which a fluctuating quantity counts as out of its band: one odd step is not a fault."""

TREND = 20
"""Logged steps below which nothing is said about a trend."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact that speaks for or against a cause.

    Example: Evidence("kl/k3", step=4, value=3.2, limit=1.0, note="The KL ... was 3.2 at step 4; 1 is the limit.")
    """

    metric: str
    """A canonical quantity, a setting, or the name of a measurement as it stands in the log."""
    step: int
    """Where the fact holds last; 0 for a setting."""
    value: float
    limit: float
    note: str
    """The same in one plain sentence, numbers included."""
    strength: Strength = "strong"
    """proof: hardly anything else can show it; strong: the usual sign; weak: only fits."""
    since: int | None = None
    """Where it began to hold; None = at `step`."""

    @property
    def onset(self) -> int:
        return self.step if self.since is None else self.since


def when(streak: Streak) -> str:
    """`at step 12`, or `at step 12 and the 4 before`: true also of a streak that began before the rows at hand."""
    if streak.length == 1:
        return f"at step {streak.last}"
    return f"at step {streak.last} and the {streak.length - 1} before"


def percent(share: float) -> str:
    """`97 %`; one decimal below 10 %, so that a small share is not printed as nothing."""
    return f"{share:.0%}".replace("%", " %") if abs(share) >= 0.1 else f"{share:.1%}".replace("%", " %")


def number(value: float) -> str:
    """Three significant digits: `0.00412`, `1.3e-08`, `256`."""
    whole = math.isfinite(value) and value == round(value) and abs(value) < 1e6
    return f"{value:.0f}" if whole else f"{value:.3g}"
