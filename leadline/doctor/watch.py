"""`leadline doctor --watch`: follows a live log, and speaks only when something changes."""

import io
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from leadline import __version__
from leadline.doctor import diagnose
from leadline.doctor.follow import GrowingFile, GrowingInput, grows_by_lines
from leadline.doctor.readers import read_runs
from leadline.doctor.report import Report
from leadline.doctor.reports import json_format
from leadline.doctor.reports.examined import Examined
from leadline.doctor.reports.words import plain
from leadline.doctor.rule import Finding
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import MISSING, Column, Table
from leadline.errors import LogError

FIRST_ROWS, LAST_ROWS = 64, 448
"""Rows that are kept: how the run began, and how it is now. No rule needs more, and memory stays the same."""
QUIET_ROWS = 20
"""A finding is over when it has not held for so many new rows; before, its coming and going says nothing."""
COMMAND_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Change:
    """What is new since the last look."""

    kind: Literal["appeared", "worse", "over"]
    finding: Finding
    step: int


class Watch:
    """A log and what is known about it so far. `look` reads what is new.

    `source` is a file, a directory, or a pipe. In a directory the log with the most quantities is followed, and the
    settings beside it are read.
    """

    def __init__(
        self, source: Path | GrowingInput, *, framework: str | None = None, configs: Sequence[Path] = ()
    ) -> None:
        self.run: RunLog | None = None
        self.report: Report | None = None
        self._source = source
        self._framework = framework
        self._configs = list(configs)
        self._log: GrowingFile | GrowingInput | None = source if isinstance(source, GrowingInput) else None
        self._header = ""
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._rows = 0
        self._known: dict[str, tuple[Finding, int]] = {}

    @property
    def ended(self) -> bool:
        """No more can come."""
        return self._log is not None and self._log.ended

    def look(self) -> list[Change]:
        """Reads what is new, and says what changed: nothing, most of the time."""
        if self._log is None:
            self._open()
        news = self._read_lines() if self._log else self._read_again()
        if not news or self.run is None:
            return []
        self.report = diagnose(self.run)
        return self._changes(self.report)

    def _open(self) -> None:
        """Finds the file to follow; without one (yet), what is there is read as a whole whenever it changes."""
        assert isinstance(self._source, Path)
        if self._source.is_file():
            found = self._source if grows_by_lines(self._source) else None
        else:
            found = _richest_log(self._source) if self._source.is_dir() else None
        if found is None:
            return
        self._log = GrowingFile(found)
        if self._source.is_dir():
            self._configs += [path for path in sorted(found.parent.iterdir()) if _is_settings(path)]

    def _read_lines(self) -> bool:
        assert self._log
        news = False
        for piece in self._log.pieces():
            run = self._parse(piece)
            if run is not None:
                self.run = run if self.run is None else _joined(self.run, run)
                self._rows += len(run.rows)
                news = True
        return news

    def _parse(self, piece: str) -> RunLog | None:
        """The rows of a piece; None if it has none (a progress bar, a traceback, a header alone)."""
        if self.run is None:
            self._header = piece[: piece.find("\n") + 1] if _is_csv_header(piece) else ""
        else:
            piece = self._header + piece
        framework = self._framework or (self.run.framework if self.run else None)
        try:
            runs = read_runs(
                [io.StringIO(piece)], framework=framework, config_paths=self._configs if not self.run else []
            )
        except LogError:
            return None
        runs = [run for run in runs if len(run.rows)]
        return replace(runs[-1], rows=_bounded(runs[-1].table)) if runs else None

    def _read_again(self) -> bool:
        assert isinstance(self._source, Path)
        seen = _fingerprint(self._source)
        if seen == self._seen or not seen:
            return False
        self._seen = seen
        try:
            self.run = read_runs([self._source], framework=self._framework, config_paths=self._configs)[-1]
        except LogError:
            return False  # half-written: the next look reads it again when it is whole
        self._rows = len(self.run.rows)
        return True

    def _changes(self, report: Report) -> list[Change]:
        step = int(self.run.rows[-1]["step"]) if self.run and self.run.rows else 0
        changes = []
        for finding in report.findings:
            before = self._known.get(finding.rule)
            if before is None:
                changes.append(Change("appeared", finding, step))
            elif before[0].severity == "warning" and finding.severity == "error":
                changes.append(Change("worse", finding, step))
            self._known[finding.rule] = (finding, self._rows)
        for finding, held in list(self._known.values()):
            if self._rows - held >= QUIET_ROWS:
                del self._known[finding.rule]
                changes.append(Change("over", finding, step))
        return changes


def watch(
    source: Path | GrowingInput,
    *,
    framework: str | None = None,
    configs: Sequence[Path] = (),
    on_fault: str | None = None,
    every: float = 5.0,
    console: Console | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Watch:
    """Follows until the pipe ends or Ctrl-C, and hands back what is known then."""
    console = console or Console(highlight=False)
    watched = Watch(source, framework=framework, configs=configs)
    greeted = False
    try:
        while True:
            changes = watched.look()
            if not greeted and watched.run:
                console.print(Text(_greeting(watched.run, watched.report), style="dim"))
                greeted = True
            for change in changes:
                console.print(_said(change), soft_wrap=True)
            if on_fault and any(change.kind != "over" and change.finding.severity == "error" for change in changes):
                _run_command(on_fault, watched, console)
            if watched.ended:
                return watched
            if isinstance(source, Path):
                wait(every)
    except KeyboardInterrupt:
        return watched


def _greeting(run: RunLog, report: Report | None) -> str:
    state = "" if report and report.findings else " Nothing wrong so far."
    return f"Following {run.framework}, at step {int(run.rows[-1]['step'])}.{state}"


def _said(change: Change) -> Text:
    finding = change.finding
    if change.kind == "over":
        return Text.assemble(f"step {change.step}: ", ("✓ over", "green"), f" {finding.rule} {finding.name}")
    tone, sign = ("red", "✗") if finding.severity == "error" else ("yellow", "!")
    worse = "now an error: " if change.kind == "worse" else ""
    sure = f" ({finding.confidence}, since step {finding.step})" if finding.confidence else ""
    lines = [f"  {finding.message}", f"  Fix: {finding.fix}"]
    lines += [f"  Avoid: {finding.avoid}"] if finding.avoid else []
    head = (f"{sign} {worse}{finding.rule} {finding.name}", f"bold {tone}")
    return Text.assemble(f"step {change.step}: ", head, plain(f": {finding.title}{sure}\n" + "\n".join(lines)))


def _run_command(command: str, watched: Watch, console: Console) -> None:
    """The user's own command, with the report as JSON on its input; what goes wrong in it does not end the watch."""
    assert watched.run and watched.report
    report = json_format.render([Examined(watched.run, watched.report)], __version__)
    try:
        done = subprocess.run(command, shell=True, input=report.encode(), timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        console.print(
            Text(f"  `{command}` took more than {COMMAND_SECONDS} s and was ended", style="yellow"), soft_wrap=True
        )
        return
    if done.returncode:
        console.print(Text(f"  `{command}` ended with exit code {done.returncode}", style="yellow"), soft_wrap=True)


def _bounded(table: Table) -> Table:
    """The first and the last rows."""
    if len(table) <= FIRST_ROWS + LAST_ROWS:
        return table
    return table.take(np.r_[0:FIRST_ROWS, len(table) - LAST_ROWS : len(table)])


def _joined(old: RunLog, new: RunLog) -> RunLog:
    """Old rows, then new; where a resumed run counts its steps again, the later row holds."""
    kept, added = old.table, new.table
    kept = kept.take(kept.steps < added.steps[0])
    columns = {name: _end_to_end(name, kept, added) for name in {**kept.columns, **added.columns}}
    table = Table(np.concatenate([kept.steps, added.steps]), columns)
    return replace(old, rows=_bounded(table), raw_names={**old.raw_names, **new.raw_names})


def _end_to_end(name: str, first: Table, second: Table) -> Column:
    parts = [table.columns.get(name) or _empty(len(table)) for table in (first, second)]
    return Column(np.concatenate([part.values for part in parts]), np.concatenate([part.codes for part in parts]))


def _empty(rows: int) -> Column:
    return Column(np.full(rows, np.nan), np.full(rows, MISSING, np.uint8))


def _richest_log(directory: Path) -> Path | None:
    """Of the files to which lines are appended, the one with the most quantities in its first rows."""
    files = sorted(path for depth in ("*", "*/*") for path in directory.glob(depth) if path.is_file())
    rated = [(_quantities(path), path) for path in files if grows_by_lines(path)]
    best = max(rated, default=(0, None), key=lambda pair: pair[0])
    return best[1] if best[0] else None


def _quantities(path: Path) -> int:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            runs = read_runs([io.StringIO(file.read(1 << 16))])
    except (LogError, OSError):
        return 0
    return max((len(run.names) for run in runs if len(run.rows)), default=0)


def _is_settings(path: Path) -> bool:
    return path.suffix in (".json", ".yaml", ".yml", ".toml") and any(word in path.stem for word in ("config", "args"))


def _is_csv_header(piece: str) -> bool:
    first = piece[: piece.find("\n")]
    return (
        "," in first and not first.lstrip().startswith(("{", "[")) and not any(c.isdigit() for c in first.split(",")[0])
    )


def _fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when something in it does: name, size and time of each file; empty if there is none."""
    files = [path] if path.is_file() else [item for item in path.glob("**/*") if item.is_file()]
    stats = [(str(item), item.stat()) for item in sorted(files)[:10_000]]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
