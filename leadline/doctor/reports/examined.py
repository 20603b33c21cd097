"""A run together with what the doctor says about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leadline.doctor.report import Report, Verdict
from leadline.doctor.run_log import RunLog


@dataclass(frozen=True, slots=True)
class Examined:
    """What a renderer is given: the plots need the numbers, the words are in the report."""

    run: RunLog
    report: Report
    configs: tuple[Path, ...] = ()
    """Files that the user named as its settings."""


def worst(runs: Sequence[Examined]) -> Verdict:
    """A fault if one run has one, else undecided if one is, else healthy."""
    verdicts = {run.report.verdict for run in runs}
    return next(verdict for verdict in ("fault", "undecided", "healthy") if verdict in verdicts)
