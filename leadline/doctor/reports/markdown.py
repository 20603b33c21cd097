"""The report as Markdown, to paste into an issue."""

from collections.abc import Iterator, Sequence

from leadline.doctor.report import Budget
from leadline.doctor.reports.examined import Examined
from leadline.doctor.reports.words import (
    because,
    bounds,
    budget_steps,
    harmless,
    headline,
    reasons,
    run_facts,
    unchecked,
)
from leadline.doctor.rule import Finding

SHOWN = 6


def render(runs: Sequence[Examined], version: str) -> str:
    """One section per run."""
    sections = ["\n".join(_lines(run)).rstrip() for run in runs]
    return "\n\n---\n\n".join(sections) + f"\n\n_leadline doctor {version}_\n"


def _lines(examined: Examined) -> Iterator[str]:
    report = examined.report
    yield f"## leadline doctor: {headline(report)}"
    yield ""
    yield because(report)
    yield ""
    yield " · ".join(f"{name}: {_inline(value)}" for name, value in run_facts(examined))
    yield ""
    for index, finding in enumerate(report.findings, start=1):
        yield from _finding(index, finding)
    if report.budget:
        yield from _budget(report.budget)
    if report.ruled_out:
        yield from _listed("Ruled out", [f"**{cause.title.rstrip('.')}**: {cause.fact}" for cause in report.ruled_out])
    yield from _listed("Looks odd, is harmless", harmless(report))
    if report.not_checked:
        yield f"<details><summary>{unchecked(examined)}</summary>"
        yield ""
        yield from (f"- `{check.name}`: {'; '.join(reasons(check))}" for check in report.not_checked)
        yield ""
        yield "</details>"
        yield ""
    if report.notes:
        yield from _listed("About the log", report.notes)


def _finding(index: int, finding: Finding) -> Iterator[str]:
    yield f"### {index}. {finding.title}"
    yield ""
    since = f"since step {finding.step}" if finding.step else ""
    parts = (f"**{finding.severity}**", finding.confidence, since, f"`{finding.rule} {finding.name}`")
    yield " · ".join(part for part in parts if part)
    yield ""
    notes = [item.note for item in finding.evidence]
    yield from _listed("Evidence", _cut(notes) if notes else [finding.message])
    yield from _listed("Speaks against it", [item.note for item in finding.against])
    yield from _listed("It could also be", finding.rivals)
    yield from _listed("It explains", [f"`{name}`" for name in finding.consequences])
    for label, text in (("Fix", finding.fix), ("Avoid", finding.avoid), ("What would decide it", finding.confirm)):
        if text:
            yield f"**{label}:** {text}"
            yield ""


def _cut(notes: Sequence[str]) -> list[str]:
    rest = [f"and {len(notes) - SHOWN} more"] if len(notes) > SHOWN else []
    return [*notes[:SHOWN], *rest]


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"**{title}**"
        yield ""
        yield from (f"- {' '.join(line.split())}" for line in lines)
        yield ""


def _budget(budget: Budget) -> Iterator[str]:
    yield f"**Signal budget** {budget_steps(budget)}".rstrip()
    yield ""
    yield "| factor | value | from |"
    yield "|---|---|---|"
    for factor in budget.factors:
        value = bounds(factor.low, factor.high)
        yield f"| {factor.name} | {f'**{value}** (dead)' if factor.dead else value} | {_cell(factor.source)} |"
    yield ""
    if budget.note:
        yield budget.note
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _inline(text: str) -> str:
    """A value of the log as code, so that nothing in it is taken for Markdown."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
