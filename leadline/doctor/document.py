"""`python -m leadline.doctor.document [DIRECTORY]` writes the page of each rule, from its docstring."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from leadline.doctor.confidence import __doc__ as CONFIDENCE
from leadline.doctor.rule import Need, Rule, alternatives
from leadline.doctor.rules import RULES
from leadline.metrics import find

FILLED = {
    "{token}": 'leadline: `objective.importance_level = "token"`, `objective.importance_action = "truncate"`',
    "{double}": "four times as much if it is 512 or less, else twice",
    "{advice} ": "",
}
"""What stands on a page for the words that a finding fits to its run."""


def pages(rules: Sequence[Rule] = RULES) -> dict[str, str]:
    """File name -> Markdown: one page per rule, and `index.md`."""
    written = {f"{rule.name}.md": _page(rule) for rule in rules}
    return {**written, "index.md": _index(rules)}


def write(directory: Path) -> None:
    """The directory holds exactly the pages."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for path in directory.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text)


def _page(rule: Rule) -> str:
    body = inspect.cleandoc(rule.__doc__ or "").split("\n", 1)[1].strip()
    for placeholder, words in FILLED.items():
        body = body.replace(placeholder, words)
    parts = [f"# {rule.id} {rule.name}", "", f"**{rule.title}** Severity: {rule.severity}.", "", body, ""]
    if rule.confirm:
        parts += ["## What would prove it", "", rule.confirm, ""]
    parts += ["## Needs", "", *(_need(need) for need in rule.needs or ("settings, or a measurement",)), ""]
    if rule.explains:
        parts += ["## Explains", "", ", ".join(f"[{name}]({name}.md)" for name in sorted(rule.explains)), ""]
    return "\n".join(parts)


def _need(need: Need) -> str:
    names = alternatives(need)
    return "- " + ", or ".join(f"`{name}`: {quantity.meaning}" if (quantity := find(name)) else name for name in names)


def _index(rules: Sequence[Rule]) -> str:
    rows = [f"| {rule.id} | [{rule.name}]({rule.name}.md) | {rule.severity} | {rule.title} |" for rule in rules]
    heading = [
        "# Rules of the doctor",
        "",
        "Asked in this order, because an upstream defect explains those downstream. A rule fires, is clear, is ruled out by",
        "a fact, or was not checked because something it needs was not logged.",
        "",
        "| id | name | severity | what is wrong |",
        "|---|---|---|---|",
    ]
    return "\n".join([*heading, *rows, "", "## Confidence", "", (CONFIDENCE or "").strip(), ""])


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "rules")
