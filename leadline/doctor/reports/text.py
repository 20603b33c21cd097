"""The report for a terminal: complete without colour, good at 80 columns."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule as Line
from rich.table import Table
from rich.text import Text

from leadline.doctor.report import Budget, Factor, NotChecked, RuledOut
from leadline.doctor.reports.curves import sparkline
from leadline.doctor.reports.examined import Examined
from leadline.doctor.reports.figures import numbers
from leadline.doctor.reports.words import (
    because,
    bounds,
    budget_steps,
    count,
    harmless,
    headline,
    number,
    plain,
    reasons,
    run_facts,
    tone,
    unchecked,
)
from leadline.doctor.rule import Finding
from leadline.doctor.run_log import RunLog

TONES = {
    "fault": "red",
    "doubt": "yellow",
    "healthy": "green",
    "undecided": "yellow",
    "error": "red",
    "warning": "yellow",
}
SIGNS = {"fault": "✗", "doubt": "!", "healthy": "✓", "undecided": "?", "error": "✗", "warning": "!"}
LABEL_WIDTH = 11
CURVE_WIDTH = 24
SHOWN, UNDECIDED_SHOWN = 6, 20
"""Of a list of evidence or of checks so many are printed; the rest is counted. More of the checks where nothing
could be decided, for there they are what matters."""


def print_reports(runs: Sequence[Examined], console: Console, *, everything: bool = False) -> None:
    """Each run's report. `everything` prints lists in full."""
    for index, examined in enumerate(runs):
        if index:
            console.print(Line(style="dim"))
        for part in _parts(examined, everything):
            console.print(part, highlight=False)


def _parts(examined: Examined, everything: bool) -> Iterator[RenderableType]:
    run, report = examined.run, examined.report
    kind = tone(report)
    yield Text(plain(" · ".join(f"{name} {value}" for name, value in run_facts(examined))), style="dim")
    yield Text.assemble((f"{SIGNS[kind]} {headline(report)}. ", f"bold {TONES[kind]}"), plain(because(report)))
    if report.budget:
        yield _section(f"Signal budget, {budget_steps(report.budget)}".removesuffix(", "), _budget(report.budget))
    for index, finding in enumerate(report.findings, start=1):
        yield _finding(index, finding, run, everything)
    if report.ruled_out:
        yield _section("Ruled out", _ruled_out(report.ruled_out, everything))
    if harmless(report):
        yield _section("Looks odd, is harmless", Group(*(_bullet(text) for text in harmless(report))))
    if report.not_checked:
        yield _section("Could not check", _not_checked(examined, everything))
    if report.notes:
        yield _section("About the log", Group(*(_bullet(note) for note in report.notes)))


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group("", Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def _finding(index: int, finding: Finding, run: RunLog, everything: bool) -> RenderableType:
    color = TONES[finding.severity]
    sure = f" · {finding.confidence}" if finding.confidence else ""
    since = f" · since step {finding.step}" if finding.step else ""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL_WIDTH, no_wrap=True, style="dim")
    grid.add_column()
    for label, body in _rows(finding, run, everything):
        grid.add_row(label, body)
    return Group(
        "",
        Text.assemble((f"{index} {finding.title}", f"bold {color}")),
        Padding(Text(f"{finding.severity}{sure}{since} · {finding.rule} {finding.name}", style="dim"), (0, 0, 0, 2)),
        Padding(grid, (0, 0, 0, 2)),
    )


def _rows(finding: Finding, run: RunLog, everything: bool) -> Iterator[tuple[str, RenderableType]]:
    curve = _curve(finding, run)
    if curve:
        yield "curve", curve
    if finding.evidence:
        yield "evidence", _bullets((item.note for item in finding.evidence), everything)
    else:
        yield "what", _code(finding.message)
    if finding.against:
        yield "against", _bullets((item.note for item in finding.against), everything)
    if finding.rivals:
        yield "or else", _bullets(finding.rivals, everything)
    if finding.consequences:
        yield "it explains", _code(", ".join(finding.consequences))
    if finding.fix:
        yield "fix", _code(finding.fix, "bold")
    if finding.avoid:
        yield "avoid", _code(finding.avoid)
    if finding.confirm:
        yield "to decide", _code(finding.confirm)


def _curve(finding: Finding, run: RunLog) -> Text | None:
    """The evidence's first logged curve as one line: `▁▂▇█  kl/k3, 0.01 to 3.2`."""
    for item in finding.evidence:
        values = [value for _, value in numbers(run, item.metric)]
        if len(values) > 1:
            ends = f"{item.metric}, {number(values[0])} to {number(values[-1])}"
            return Text.assemble((sparkline(values, CURVE_WIDTH), TONES[finding.severity]), "  ", (plain(ends), "dim"))
    return None


def _bullets(lines: Iterable[str], everything: bool) -> RenderableType:
    lines = list(lines)
    shown = lines if everything else lines[:SHOWN]
    rest = [f"and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    return Group(*(_bullet(line) for line in [*shown, *rest]))


def _bullet(line: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("-", style="dim"), _code(line))
    return grid


def _code(text: str, style: str = "") -> Text:
    """The text with what is between backticks in colour; the backticks stay, so that it reads the same without."""
    text = plain(text)
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return Text(text)
    return Text.assemble(*((f"`{part}`", f"{style} cyan".strip()) if i % 2 else part for i, part in enumerate(parts)))


def _budget(budget: Budget) -> RenderableType:
    """`advantages 0.9 × »importance weight 1.3e-8« × ...`, then where the update dies."""
    parts: list[str | tuple[str, str]] = []
    for factor in budget.factors:
        words = f"{factor.name} {bounds(factor.low, factor.high)}"
        parts += [" × "] if parts else []
        parts.append((f"»{words}«", "bold red") if factor.dead else words)
    lines: list[RenderableType] = [Text.assemble(*parts)]
    lines += [Text(plain(_grave(factor)), style="red") for factor in budget.dead]
    return Group(*lines, _code(budget.note)) if budget.note else Group(*lines)


def _grave(factor: Factor) -> str:
    origin = f" (from {factor.source})" if factor.source else ""
    return f"The update dies at the {factor.name}{origin}."


def _ruled_out(causes: Sequence[RuledOut], everything: bool) -> RenderableType:
    return _bullets((f"{cause.title.rstrip('.')}: {cause.fact}" for cause in causes), everything)


def _not_checked(examined: Examined, everything: bool) -> RenderableType:
    """Broken checks first, then those that an option would allow."""
    checks = sorted(examined.report.not_checked, key=lambda check: (not check.broke, not check.enable))
    if not everything and not len(examined.run.rows):
        checks = [check for check in checks if check.broke]
        return Group(*(_bullet(_check(check)) for check in checks), _bullet(unchecked(examined)))
    limit = len(checks) if everything else UNDECIDED_SHOWN if examined.report.verdict == "undecided" else SHOWN
    rest = len(checks) - limit
    lines = [_check(check) for check in checks[:limit]]
    lines += [f"and {count(rest, 'more check')} (`--all` lists them)"] if rest > 0 else []
    return Group(*(_bullet(line) for line in lines))


def _check(check: NotChecked) -> str:
    return f"{check.name}: " + ". ".join(line.rstrip(".") for line in reasons(check))
