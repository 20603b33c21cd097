"""`leadline doctor` and `leadline rules`: parses, reads, prints, sets the exit code.

Exit codes of `leadline doctor`: 0 checked and clean, 1 a fault, 2 unreadable or used wrongly, 3 could not decide (what
decides was not logged, or a check broke).
"""

import io
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from leadline.errors import LogError

if TYPE_CHECKING:
    from leadline.doctor.reports.examined import Examined

STDIN = Path("-")


class Format(StrEnum):
    """What a report is written as."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    SARIF = "sarif"


class FailOn(StrEnum):
    """What makes the exit code 1."""

    ERROR = "error"
    WARNING = "warning"
    NEVER = "never"


AFTERWORDS: list[Callable[[Path], str | None]] = []
"""Asked for a sentence about each run directory after a report with findings: what takes more than the doctor may import.
The command line adds to it."""

SUFFIXES = {
    ".json": Format.JSON,
    ".md": Format.MARKDOWN,
    ".html": Format.HTML,
    ".htm": Format.HTML,
    ".sarif": Format.SARIF,
}
"""The format of `--output FILE` where `--format` is not given."""


def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run directories, logs, configs; - is standard input.", metavar="[PATH]...", show_default=False
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which trainer wrote it, where the log does not show it: trl, verl, openrlhf ..."
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The settings of the run, where they are not beside the log; repeatable."),
    ] = None,
    format: Annotated[
        Format | None, typer.Option(help="Default: text, or by the name of --output.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file.")] = None,
    since: Annotated[int | None, typer.Option(metavar="STEP", help="Look only at rows from this step on.")] = None,
    fail_on: Annotated[FailOn, typer.Option(help="The least that makes the exit code 1.")] = FailOn.ERROR,
    everything: Annotated[bool, typer.Option("--all", help="Print long lists in full.")] = False,
    coverage: Annotated[
        bool,
        typer.Option("--coverage", help="Print what of the log was understood, what not, and what could be logged."),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow a live log; speak only when something changes.")
    ] = False,
    on_fault: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="With --watch: run this when a fault appears (JSON on its input)."),
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.05, help="With --watch: how often to look.")] = 5.0,
) -> None:
    """Say what is wrong with a training run, how sure that is, and what to change.

    Reads logs and settings of leadline, TRL, verl, OpenRLHF, slime, prime-rl, AReaL, SkyRL, NeMo-RL, ROLL, open-instruct
    and ART, recognised by their content.

    Exit codes: 0 checked and clean, 1 a fault, 2 unreadable or used wrongly, 3 could not decide.
    """
    _write_anything()
    sources = _sources(paths or [])
    if watch:
        raise typer.Exit(_watch(sources, framework, config or [], on_fault, every, fail_on))
    if coverage:
        raise typer.Exit(_coverage(sources, framework, config or []))
    runs = _examine(sources, framework, config or [], since)
    _write(runs, _format(format, output), output, everything)
    if output is None and _format(format, output) is Format.TEXT and any(run.report.findings for run in runs):
        _add_afterwords(sources)
    raise typer.Exit(exit_code(runs, fail_on))


def rules(
    rule: Annotated[
        str | None, typer.Argument(help="Print the page of this rule.", metavar="ID|NAME", show_default=False)
    ] = None,
) -> None:
    """Print the rules of the doctor, or the page of one."""
    from leadline.doctor.catalogue import print_catalogue, print_page

    console = Console(highlight=False)
    if rule is None:
        print_catalogue(console)
    else:
        print_page(rule, console)


def exit_code(runs: Sequence["Examined"], fail_on: FailOn) -> int:
    """1 for a finding that is grave enough, else 3 if a run could not be decided or a check broke, else 0."""
    severities = {finding.severity for run in runs for finding in run.report.findings}
    grave = {FailOn.ERROR: {"error"}, FailOn.WARNING: {"error", "warning"}, FailOn.NEVER: set()}[fail_on]
    if severities & grave:
        return 1
    broken = any(check.broke for run in runs for check in run.report.not_checked)
    return 3 if broken or any(run.report.verdict == "undecided" for run in runs) else 0


def _write_anything() -> None:
    """What the terminal's encoding cannot show is printed escaped: a log may hold any text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _sources(paths: Sequence[Path]) -> list[Path | TextIO]:
    if not paths and sys.stdin.isatty():
        raise LogError(
            "PATH is missing, but standard input is a terminal. There is nothing to examine. "
            "Name a run directory, a log or a config, or paste a log into `leadline doctor -`."
        )
    return [sys.stdin if path == STDIN else path for path in paths or [STDIN]]


def _examine(
    sources: Sequence[Path | TextIO], framework: str | None, configs: Sequence[Path], since: int | None
) -> list["Examined"]:
    from leadline.doctor import diagnose
    from leadline.doctor.readers import read_runs
    from leadline.doctor.reports.examined import Examined

    runs = read_runs(sources, framework=framework, config_paths=configs)
    if since is not None:
        runs = [run.since(since) for run in runs]
        if not any(len(run.rows) for run in runs):
            raise LogError(
                f"--since is {since}, but no row has a step as late. There is nothing to examine. Choose an earlier step."
            )
    return [Examined(run, diagnose(run), tuple(configs)) for run in runs]


def _add_afterwords(sources: Sequence[Path | TextIO]) -> None:
    directories = [source for source in sources if isinstance(source, Path) and source.is_dir()]
    for sentence in (afterword(path) for path in directories for afterword in AFTERWORDS):
        if sentence is not None:
            Console(highlight=False).print(f"\n{sentence}", markup=False, soft_wrap=True)


def _format(chosen: Format | None, output: Path | None) -> Format:
    if chosen is not None:
        return chosen
    return SUFFIXES.get(output.suffix.lower(), Format.TEXT) if output else Format.TEXT


def _write(runs: Sequence["Examined"], format: Format, output: Path | None, everything: bool) -> None:
    from leadline.doctor.reports import as_text, render
    from leadline.doctor.reports.text import print_reports

    console = Console(highlight=False)
    if output is None and format is Format.TEXT and console.is_terminal:
        print_reports(runs, console, everything=everything)
        return
    width = 100 if output else console.width
    written = as_text(runs, everything, width) if format is Format.TEXT else render(runs, format.value)
    if output is None:
        sys.stdout.write(written if written.endswith("\n") else written + "\n")
        return
    try:
        output.write_text(written, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise LogError(
            f"--output is {str(output)!r}, but it cannot be written ({error.strerror}). The report is lost. "
            "Name a file in a directory that exists and is yours."
        ) from error
    Console(stderr=True).print(f"The report is in {output}", highlight=False, markup=False, soft_wrap=True)


def _coverage(sources: Sequence[Path | TextIO], framework: str | None, configs: Sequence[Path]) -> int:
    from leadline.doctor.readers import read_runs
    from leadline.doctor.reports.coverage import print_coverage

    print_coverage(read_runs(sources, framework=framework, config_paths=configs), Console(highlight=False))
    return 0


def _watch(
    sources: Sequence[Path | TextIO],
    framework: str | None,
    configs: Sequence[Path],
    on_fault: str | None,
    every: float,
    fail_on: FailOn,
) -> int:
    from leadline.doctor.follow import GrowingInput
    from leadline.doctor.reports.examined import Examined
    from leadline.doctor.watch import watch

    if len(sources) != 1:
        raise LogError(
            f"--watch is given with {len(sources)} paths, but it follows one file, directory or pipe. "
            "There is nothing to follow. Name one path."
        )
    source = sources[0] if isinstance(sources[0], Path) else GrowingInput(wait=every)
    seen = watch(source, framework=framework, configs=configs, on_fault=on_fault, every=every)
    return exit_code([Examined(seen.run, seen.report)], fail_on) if seen.run and seen.report else 3
