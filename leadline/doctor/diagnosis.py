"""From a run to the doctor's whole answer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from leadline.doctor import differential
from leadline.doctor.benign import reassurances
from leadline.doctor.budget import budget
from leadline.doctor.examine import Diagnosis, Verdict, consequences, examine, rank, without_consequences
from leadline.doctor.report import NotChecked, Report
from leadline.doctor.report import Verdict as Answer
from leadline.doctor.rule import Finding, Rule
from leadline.doctor.rules import RULES
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import GRAD, KL, SPREAD, ZERO_SIGNAL
from leadline.doctor.view import View
from leadline.errors import LogError

DECIDING: tuple[tuple[str, ...], ...] = (("reward/mean", "loss"), (*GRAD, *KL, *SPREAD, *ZERO_SIGNAL))
"""A log without one of each cannot be called healthy: nobody could tell."""


def diagnose(run: RunLog | Path | str, rules: Sequence[Rule] = RULES) -> Report:
    """What is wrong with a run, most likely first; what was ruled out, and what could not be checked.

    A path is read as `leadline doctor PATH` reads it and must hold one run. Raises LogError: it cannot be read, or
    holds several runs.
    """
    log = run if isinstance(run, RunLog) else _read(Path(run))
    view = View(log)
    diagnoses = examine(view, rules)
    ranked = rank(diagnoses)
    causes = without_consequences(ranked)
    findings = tuple(_told(view, item, ranked, causes) for item in causes)
    forbidden = {item.rule.name: item.forbidden[0].note for item in diagnoses if item.forbidden}
    return Report(
        verdict=_verdict(view, findings, diagnoses),
        findings=findings,
        budget=budget(view),
        ruled_out=differential.ruled_out(view, rules, forbidden),
        not_checked=tuple(_unchecked(view, item) for item in diagnoses if item.verdict in _OPEN),
        facts={**_facts(view), **(reassurances(view) if not any(f.severity == "error" for f in findings) else {})},
        source=log.source,
        framework=view.framework,
        notes=log.notes,
    )


_OPEN = (Verdict.NOT_CHECKED, Verdict.BROKE)


def _read(path: Path) -> RunLog:
    from leadline.doctor.readers import read_runs

    runs = read_runs([path])
    if len(runs) != 1:
        raise LogError(
            f"{str(path)!r} holds {len(runs)} runs, but diagnose answers about one. Their findings would mix. "
            "Read them with leadline.doctor.readers.read_runs and diagnose each."
        )
    return runs[0]


def _told(view: View, item: Diagnosis, ranked: Sequence[Diagnosis], causes: Sequence[Diagnosis]) -> Finding:
    assert item.finding
    others = differential.rivals(view, item.rule.name)
    rivals = tuple(
        f"{other.rule.name} ({other.finding.confidence})"
        for other in causes
        if other.finding and other.rule.name in others
    )
    return replace(item.finding, rivals=rivals, consequences=consequences(item, ranked))


def _verdict(view: View, findings: Sequence[Finding], diagnoses: Sequence[Diagnosis]) -> Answer:
    """A fault if anything was found; healthy only if what decides was logged and no check broke."""
    if findings:
        return "fault"
    broke = any(item.verdict is Verdict.BROKE for item in diagnoses)
    blind = any(not any(len(view[name].known) for name in names) for names in DECIDING)
    return "undecided" if broke or (blind and view.rows > 0) else "healthy"


def _unchecked(view: View, item: Diagnosis) -> NotChecked:
    missing = item.missing or item.undefined
    could = view.run.could_log
    enable = "; ".join(dict.fromkeys(could[name] for name in missing if name in could))
    return NotChecked(item.rule.id, item.rule.name, item.rule.title, missing, enable, item.error)


def _facts(view: View) -> dict[str, str]:
    facts = {"framework": view.framework}
    if view.rows:
        facts["rows"] = str(view.rows)
        facts["steps"] = f"{int(np.min(view.steps))} to {int(np.max(view.steps))}"
    for label, setting in (
        ("model", "model.name"),
        ("loss", "objective.loss"),
        ("group size", "rollout.group_size"),
        ("learning rate", "optimizer.learning_rate"),
        ("beta", "objective.beta"),
    ):
        value = view.setting(setting)
        if value is not None:
            facts[label] = str(value)
    return facts
