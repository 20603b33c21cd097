"""The report as one HTML file: plots inline, nothing fetched, light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from leadline.doctor.report import Budget, Report
from leadline.doctor.reports.examined import Examined
from leadline.doctor.reports.figures import Figure, evidence_figures, ledger_figure, run_figures
from leadline.doctor.reports.words import (
    because,
    bounds,
    budget_steps,
    count,
    harmless,
    headline,
    reasons,
    run_facts,
    tone,
    unchecked,
)
from leadline.doctor.rule import Finding

EVIDENCE_SHOWN = 6


@dataclass(frozen=True, slots=True)
class _Page:
    """One run, as the template wants it."""

    report: Report
    tone: str
    headline: str
    because: str
    facts: Sequence[tuple[str, str]]
    evidence: Sequence[Sequence[Figure]]
    """Beside each finding."""
    factors: Sequence[dict[str, str]]
    budget_steps: str
    budget_note: str
    figures: Sequence[Figure]
    ledger: tuple[str, list[tuple[str, str]]] | None
    harmless: Sequence[str]
    not_checked: str


def render(runs: Sequence[Examined], version: str) -> str:
    """The whole page. Everything that comes from the log is escaped."""
    here = files("leadline.doctor.reports")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(ticks=_ticks, reasons=reasons)
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    pages = [_page(run) for run in runs]
    return template.render(
        pages=pages,
        title=f"leadline doctor: {pages[0].headline}"
        if len(pages) == 1
        else f"leadline doctor: {count(len(pages), 'run')}",
        style=Markup(here.joinpath("style.css").read_text(encoding="utf-8")),
        version=version,
        shown=EVIDENCE_SHOWN,
    )


def _page(examined: Examined) -> _Page:
    run, report = examined.run, examined.report
    findings: Sequence[Finding] = report.findings
    return _Page(
        report=report,
        tone=tone(report),
        headline=headline(report),
        because=because(report),
        facts=run_facts(examined),
        evidence=[evidence_figures(run, finding, str(index)) for index, finding in enumerate(findings, start=1)],
        factors=_factors(report.budget),
        budget_steps=budget_steps(report.budget),
        budget_note=report.budget.note if report.budget else "",
        figures=run_figures(run, findings),
        ledger=ledger_figure(run, findings),
        harmless=harmless(report),
        not_checked=unchecked(examined),
    )


def _factors(budget: Budget | None) -> list[dict[str, str]]:
    if budget is None:
        return []
    return [
        {
            "name": factor.name,
            "value": bounds(factor.low, factor.high),
            "source": factor.source,
            "kind": "dead" if factor.dead else "unknown" if factor.low is None and factor.high is None else "",
        }
        for factor in budget.factors
    ]


def _ticks(text: Any) -> Markup:
    """`code` between backticks becomes code; everything else is escaped."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:
        return Markup(escape(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )
