"""A report on a terminal and as JSON."""

import dataclasses
import json
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leadline.probes.code.findings import Finding, Report

TONES = {"error": "red", "note": "yellow"}
SIGNS = {"error": "✗", "note": "·"}


def print_report(report: Report, console: Console) -> None:
    """Verdict first, then what is wrong, then what its caller must see to, then how it was called."""
    console.print(Text(f"{report.target} as {report.role}  {report.place}", style="dim"), highlight=False)
    tone = "red" if report.errors else "green"
    sign = "✗" if report.errors else "✓"
    console.print(Text(f"{sign} {report.verdict}", style=f"bold {tone}"), highlight=False)
    for finding in report.errors:
        console.print(Padding(_error(finding), (1, 0, 0, 0), expand=False), highlight=False)
    notes = [finding for finding in report.findings if finding.level == "note"]
    if notes:
        console.print(Text("\nRight as long as the caller sees to it", style="bold"))
        console.print(Padding(_notes(notes), (0, 0, 0, 2), expand=False), highlight=False)
    console.print(Text("\nHow it was compared", style="bold"))
    console.print(Padding(_facts(report), (0, 0, 0, 2), expand=False), highlight=False)


def to_json(report: Report) -> str:
    """Every field of the report, and the exit code."""
    return json.dumps(dataclasses.asdict(report) | {"exit_code": report.exit_code}, indent=2, ensure_ascii=False)


def _error(finding: Finding) -> RenderableType:
    rows = [("evidence", finding.evidence), ("then", finding.consequence), ("fix", finding.fix)]
    head = Text.assemble((f"✗ {finding.title}", "red"), (f"  {finding.name}", "dim"))
    return Group(head, Padding(_grid((label, text) for label, text in rows if text), (0, 0, 0, 2), expand=False))


def _notes(notes: Iterable[Finding]) -> RenderableType:
    return Group(*(_note(finding) for finding in notes))


def _note(finding: Finding) -> RenderableType:
    evidence = f" ({finding.evidence})" if finding.evidence else ""
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("·", style="yellow"), Text.assemble(f"{finding.title}{evidence}. ", (finding.fix, "dim")))
    return table


def _facts(report: Report) -> RenderableType:
    adaptation = [("called with", report.adaptation[0]), ("shapes", "; ".join(report.adaptation[1:]))]
    return _grid([*((label, text) for label, text in adaptation if text), *report.facts.items()])


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    return table
