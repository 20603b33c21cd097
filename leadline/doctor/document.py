"""`python -m leadline.doctor.document [DIRECTORY]` writes the page of each rule, from its docstring."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from leadline.doctor.rule import Rule
from leadline.doctor.rules import RULES
from leadline.metrics import find


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
    return "\n".join(
        [
            f"# {rule.id} {rule.name}",
            "",
            f"**{rule.title}** Severity: {rule.severity}.",
            "",
            body,
            "",
            "## Needs",
            "",
            *(_need(name) for name in rule.needs),
            "",
        ]
    )


def _need(name: str) -> str:
    quantity = find(name)
    assert quantity, f"{name} is not a canonical quantity"
    return f"- `{name}`: {quantity.meaning}"


def _index(rules: Sequence[Rule]) -> str:
    rows = [f"| {rule.id} | [{rule.name}]({rule.name}.md) | {rule.severity} | {rule.title} |" for rule in rules]
    heading = [
        "# Rules of the doctor",
        "",
        "Asked in this order, because an upstream defect explains those downstream. A rule fires, is clear, or was not",
        "checked because something it needs was not logged.",
        "",
        "| id | name | severity | what is wrong |",
        "|---|---|---|---|",
    ]
    return "\n".join([*heading, *rows, ""])


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "rules")
