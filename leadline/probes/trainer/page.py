"""A conformance on a terminal, as JSON and as a page of the documentation."""

import dataclasses
import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadline.probes.trainer.conform import Conformance, Row


def print_conformance(result: Conformance, console: Console) -> None:
    """Departures in red, with what they are instead."""
    total, bad = len(result.rows), len(result.departures)
    tone, sign = ("red", "✗") if bad else ("green", "✓")
    console.print(
        Text(f"{sign} {result.trainer}: {total - bad} of {total} settings are their equation", f"bold {tone}")
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "setting", "equation", "what it is"):
        table.add_column(column, overflow="fold")
    for row in result.rows:
        mark = Text("✓", "green") if row.conforms else Text("✗", "red")
        table.add_row(mark, Text(row.setting), Text(row.equation), Text("" if row.conforms else row.verdict))
    console.print(table)
    console.print(Text("\nAt the edges", style="bold"))
    for part, finding in result.edges:
        console.print(Text(f"  {part}: {finding.title}. {finding.consequence}"), highlight=False)


def to_json(result: Conformance) -> str:
    """Every field, and the exit code."""
    return json.dumps(dataclasses.asdict(result) | {"exit_code": result.exit_code}, indent=2, ensure_ascii=False)


def to_markdown(result: Conformance) -> str:
    """The page."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Conformance) -> Iterator[str]:
    total, bad = len(result.rows), len(result.departures)
    yield f"# {result.trainer} against the equations"
    yield ""
    yield "Written by `leadline probe trainer trl --output docs/trl-conformance.md`. A real `GRPOTrainer` is built for each"
    yield "setting; its own loss, advantages and rollout weights are run in float64 on the seeded ragged batches of"
    yield "`leadline probe code`, values and gradients, and compared with the equations. Only the model's forward pass and"
    yield "the sampler are replaced, by the batch's numbers. A difference is relative to the largest entry."
    yield ""
    yield f"**{total - bad} of {total} settings are their equation.**"
    for part, title in (("loss", "Losses"), ("advantages", "Advantages"), ("weights", "Rollout weights")):
        yield from (
            "",
            f"## {title}",
            "",
            "| setting | equation | what it is | value | gradient |",
            "|---|---|---|---|---|",
        )
        for row in result.rows:
            if row.part == part:
                yield _markdown_row(row)
    yield from ("", "## At the edges", "")
    for part, finding in result.edges:
        yield f"- **{part}**: {finding.title}. {finding.consequence}"
    yield from ("", "Not covered: what TRL does over several processes, tool calls, images, mixtures of experts, the")
    yield "adaptive entropy bonus and the asynchronous trainer."


def _markdown_row(row: Row) -> str:
    what = "the equation" if row.conforms else f"**{row.verdict}**"
    if row.conforms and row.part == "advantages":
        what = row.verdict
    gradient = f"{row.gradient_difference:.0e}" if row.part == "loss" else ""
    return f"| {row.setting} | {row.equation} | {what} | {row.value_difference:.0e} | {gradient} |"
