"""The doctor's answer on paper: small functions from reports to text, JSON, Markdown, HTML and SARIF."""

import io
from collections.abc import Sequence

from rich.console import Console

from leadline import __version__
from leadline.doctor.reports import json_format, markdown, sarif, text
from leadline.doctor.reports.examined import Examined


def render(runs: Sequence[Examined], format: str) -> str:
    """The report of all runs as "json", "markdown", "html" or "sarif"."""
    if format == "html":
        from leadline.doctor.reports import html  # the template engine is only loaded for it

        return html.render(runs, __version__)
    renderers = {"json": json_format.render, "markdown": markdown.render, "sarif": sarif.render}
    return renderers[format](runs, __version__)


def as_text(runs: Sequence[Examined], everything: bool = False, width: int = 100) -> str:
    """The report as the terminal shows it, without colour."""
    paper = io.StringIO()
    text.print_reports(runs, Console(file=paper, width=width, color_system=None), everything=everything)
    return "".join(line.rstrip() + "\n" for line in paper.getvalue().splitlines())
