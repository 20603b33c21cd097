"""The rules as a person reads them in a terminal."""

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from leadline.doctor.document import pages
from leadline.doctor.rules import RULES
from leadline.errors import LogError


def print_catalogue(console: Console) -> None:
    """Id, severity, name and title of every rule, in the order in which they are asked."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("id", "severity", "name: what is wrong"):
        table.add_column(heading, no_wrap=heading != "name: what is wrong")
    for rule in RULES:
        table.add_row(rule.id, rule.severity, f"[bold]{rule.name}[/]: {rule.title}")
    console.print(table)
    console.print(f"{len(RULES)} rules. `leadline rules ID` prints the page of one.", markup=False)


def print_page(name: str, console: Console) -> None:
    """The page of the rule with this id or name: laid out in a terminal, Markdown elsewhere."""
    found = next((rule for rule in RULES if name.lower() in (rule.id.lower(), rule.name)), None)
    if found is None:
        near = [rule.name for rule in RULES if name.lower() in rule.name]
        hint = f"Near it: {', '.join(near)}." if near else "`leadline rules` lists them."
        raise LogError(f"The rule is {name!r}, but there is none of that id or name. There is no page to print. {hint}")
    page = pages([found])[f"{found.name}.md"]
    console.print(Markdown(page) if console.is_terminal else page, markup=False, soft_wrap=not console.is_terminal)
