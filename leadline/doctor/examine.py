"""Asks every rule about a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from leadline.doctor import confidence
from leadline.doctor.evidence import Evidence
from leadline.doctor.rule import Finding, Rule, alternatives, message
from leadline.doctor.rules import RULES
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View

WINDOW = 32
"""Rows that the live doctor looks at: enough for a trend, and a step costs the same however long the run is."""


class Verdict(StrEnum):
    """What a rule says about a run."""

    FIRES = "fires"
    CLEAR = "clear"
    RULED_OUT = "ruled out"
    """A fact forbids it."""
    NOT_CHECKED = "not checked"
    """Something it needs was not logged, or is NaN throughout: never the same as clear."""
    BROKE = "broke"
    """The check itself failed: never the same as clear either."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One rule's verdict on one run."""

    rule: Rule
    verdict: Verdict
    finding: Finding | None = None
    """Set if it fires."""
    forbidden: tuple[Evidence, ...] = ()
    """The facts that rule it out."""
    points: float = 0.0
    missing: tuple[str, ...] = ()
    """What it needs and no row has; of several that would do, the best."""
    undefined: tuple[str, ...] = ()
    """What it needs and is NaN in every row."""
    error: str = ""
    """Why the check broke."""


def examine(run: RunLog | View, rules: Sequence[Rule] = RULES) -> list[Diagnosis]:
    """One diagnosis per rule, in the order of the rules. A rule that raises is reported as broken, not as clear."""
    view = run if isinstance(run, View) else View(run)
    with np.errstate(all="ignore"):  # a log may hold any number; what comes of it is checked, not warned about
        return [_safely(rule, view) for rule in rules]


def _safely(rule: Rule, view: View) -> Diagnosis:
    try:
        return _ask(rule, view)
    except Exception as error:  # one broken check must not hide the others; the report and the exit code say it
        return Diagnosis(rule, Verdict.BROKE, error=f"{type(error).__name__}: {error}")


def _ask(rule: Rule, view: View) -> Diagnosis:
    forbidden = tuple(rule.forbids(view))
    if forbidden:
        return Diagnosis(rule, Verdict.RULED_OUT, forbidden=forbidden)
    missing = tuple(alternatives(need)[0] for need in rule.needs if not view.has(*alternatives(need)))
    evidence = [*([] if missing else rule.examine(view)), *rule.measure(view), *rule.lint(view)]
    if evidence:
        against = rule.against(view)
        score = confidence.points(evidence, against)
        if score >= confidence.POSSIBLE:
            return Diagnosis(rule, Verdict.FIRES, finding(rule, view, evidence, against), points=score)
    if missing:
        return Diagnosis(rule, Verdict.NOT_CHECKED, missing=missing)
    undefined = tuple(alternatives(need)[0] for need in rule.needs if _undefined(view, alternatives(need)))
    return Diagnosis(rule, Verdict.NOT_CHECKED if undefined else Verdict.CLEAR, undefined=undefined)


def _undefined(view: View, names: Sequence[str]) -> bool:
    return not any(len(view[name].known) for name in names)


def finding(rule: Rule, view: View, evidence: Sequence[Evidence], against: Sequence[Evidence] = ()) -> Finding:
    """The evidence (at least one) in words. Only what is likely is an error."""
    score = confidence.points(evidence, against)
    dated = [item.onset for item in evidence if item.step]
    return Finding(
        rule=rule.id,
        name=rule.name,
        severity=rule.severity if score >= confidence.LIKELY else "warning",
        title=rule.title,
        message=message(evidence),
        fix=rule.fix(view, evidence),
        evidence=tuple(evidence),
        step=min(dated, default=0),
        confidence=confidence.word(score),
        against=tuple(against),
        avoid=rule.avoid(view, evidence),
        confirm=rule.confirm if score < confidence.NEAR_CERTAIN else "",
    )


def rank(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Those that fire: most points first, then errors, then upstream (the order of ids)."""
    firing = [item for item in diagnoses if item.finding]
    return sorted(firing, key=lambda item: (-item.points, item.rule.severity != "error", item.rule.id))


def without_consequences(ranked: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The causes: what a likelier, or equally likely, finding explains is taken out and named in it.

    A merely possible cause takes nothing out: a symptom that is certain is worth more than a guess about its cause.
    """
    explained = {
        other.rule.name: item.rule.name
        for item in ranked
        if item.points >= confidence.LIKELY
        for other in ranked
        if other.rule.name in item.rule.explains
    }
    return [item for item in ranked if not _explained(item.rule.name, explained)]


def _explained(name: str, explained: Mapping[str, str]) -> bool:
    """Followed upwards; a circle would explain everything away, so it explains nothing."""
    seen = {name}
    above = explained.get(name)
    while above and above not in seen:
        seen.add(above)
        above = explained.get(above)
    return name in explained and above is None


def consequences(cause: Diagnosis, ranked: Sequence[Diagnosis]) -> tuple[str, ...]:
    """Names of the findings that the cause explains, directly or through others."""
    firing = {item.rule.name: item for item in ranked}
    found: dict[str, None] = {}
    open_ = [cause]
    while open_:
        for name in open_.pop().rule.explains:
            if name in firing and name not in found and name != cause.rule.name:
                found[name] = None
                open_.append(firing[name])
    return tuple(found)


def live_findings(
    rows: Sequence[Mapping[str, float]], config: Mapping[str, Any] | None, step: int, rules: Sequence[Rule] = RULES
) -> list[Finding]:
    """What is wrong at `step`, the last of the rows so far: the rules with evidence at that very step, causes only.

    Looks at the last `WINDOW` rows only, so a step costs the same however long the run is. A rule that breaks is
    left out here: the live doctor must never stop a run.
    """
    return findings_since(RunLog(rows[-WINDOW:], config), step, rules)


def findings_since(run: RunLog, step: int, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """The same for a run of any framework: evidence at `step` or later counts, and all of its rows are looked at."""
    view = View(run, live=True)
    ranked = rank(item for rule in rules if (item := _now(rule, view, step)))
    kept = {item.rule.name for item in without_consequences(ranked)}
    return [item.finding for item in ranked if item.finding and item.rule.name in kept]


def _now(rule: Rule, view: View, step: int) -> Diagnosis | None:
    found = _safely(rule, view).finding
    if found is None:
        return None
    evidence = [item for item in found.evidence if item.step >= step]
    if not evidence:
        return None
    return Diagnosis(
        rule,
        Verdict.FIRES,
        finding(rule, view, evidence, found.against),
        points=confidence.points(evidence, found.against),
    )
