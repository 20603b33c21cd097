"""What of a log was understood: for `leadline doctor --coverage`."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadline.doctor.readers import Coverage, coverage
from leadline.doctor.reports.words import count, plain
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import State


def print_coverage(runs: Sequence[RunLog], console: Console) -> None:
    """By run: each key that was understood and its state, each that was not and why, and what could be logged."""
    for run in runs:
        found = coverage(run)
        known, unknown = len(found.understood), len(found.not_understood)
        console.print(Text(plain(run.source) + f" · {run.framework} · {count(len(run.rows), 'row')}", style="dim"))
        console.print(Text(f"Understood {known} of {count(known + unknown, 'key')} ({found.share:.0%}).", style="bold"))
        console.print(_understood(found))
        _pairs(f"Without a meaning that the doctor knows ({unknown})", found.not_understood, console)
        _pairs(f"What {run.framework} could log and does not here ({len(found.could_log)})", found.could_log, console)
        for note in run.notes:
            console.print(Text(plain(f"- {note}")))


def _understood(found: Coverage) -> Table:
    table = _table("as logged", "quantity", "state")
    for item in found.understood:
        words = item.state.value.replace("_", " ") + (f"; {item.caveat}" if item.caveat else "")
        tone = "" if item.state is State.PRESENT else "yellow"
        table.add_row(
            Text(plain(item.key)),
            Text("same" if item.key == item.quantity else plain(item.quantity)),
            Text(words, style=tone),
        )
    return table


def _pairs(title: str, pairs: Mapping[str, str], console: Console) -> None:
    if not pairs:
        return
    table = _table("", "")
    table.show_header = False
    for name, text in pairs.items():
        table.add_row(Text(plain(name)), Text(plain(text)))
    console.print("", Text(title, style="bold"), table, sep="\n")


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
