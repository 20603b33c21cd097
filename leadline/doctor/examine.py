"""Asks every rule about a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leadline.doctor.rule import Evidence, Finding, Rule
from leadline.doctor.rules import RULES
from leadline.doctor.run_log import RunLog

WINDOW = 16
"""Rows that the live doctor looks at. No rule needs more to see what is wrong now."""


class Verdict(StrEnum):
    """What a rule says about a run."""

    FIRES = "fires"
    CLEAR = "clear"
    NOT_CHECKED = "not checked"
    """Something it needs was not logged, or is NaN throughout: never the same as clear."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One rule's verdict on one run."""

    rule: Rule
    verdict: Verdict
    finding: Finding | None = None
    """Set if it fires."""
    missing: tuple[str, ...] = ()
    """What it needs and no row has."""
    undefined: tuple[str, ...] = ()
    """What it needs and is NaN in every row."""


def examine(run: RunLog, rules: Sequence[Rule] = RULES) -> list[Diagnosis]:
    """One diagnosis per rule, in the order of the rules."""
    return [_ask(rule, run) for rule in rules]


def _ask(rule: Rule, run: RunLog) -> Diagnosis:
    missing = tuple(name for name in rule.needs if run.is_missing(name))
    if missing:
        return Diagnosis(rule, Verdict.NOT_CHECKED, missing=missing)
    evidence = rule.examine(run)
    if evidence:
        return Diagnosis(rule, Verdict.FIRES, rule.finding(run, evidence))
    undefined = tuple(name for name in rule.needs if run.is_undefined(name))
    if undefined:
        return Diagnosis(rule, Verdict.NOT_CHECKED, undefined=undefined)
    return Diagnosis(rule, Verdict.CLEAR)


def live_findings(
    rows: Sequence[Mapping[str, float]], config: Mapping[str, Any] | None, step: int, rules: Sequence[Rule] = RULES
) -> list[Finding]:
    """What is wrong at `step`, the last of the rows so far: the rules with evidence at that very step.

    Looks at the last `WINDOW` rows only, so a step costs the same however long the run is.
    """
    run = RunLog(rows[-WINDOW:], config)
    return [finding for rule in rules if (finding := _finding_at(step, rule, run))]


def _finding_at(step: int, rule: Rule, run: RunLog) -> Finding | None:
    if any(run.is_missing(name) for name in rule.needs):
        return None
    evidence: list[Evidence] = [item for item in rule.examine(run) if item.step == step]
    return rule.finding(run, evidence) if evidence else None
