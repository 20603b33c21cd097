"""Console logs and pasted fragments: rows and settings out of text, whatever stands around them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from leadline.doctor.readers.bounds import Source, decoded
from leadline.doctor.readers.collect import Collected, Collector
from leadline.doctor.readers.frameworks import FRAMEWORKS, UNKNOWN, Framework
from leadline.doctor.readers.frameworks.parsing import NUMBER, blocks, dict_items, number_text
from leadline.doctor.readers.printed_config import is_option, printed_settings
from leadline.doctor.readers.recognise import from_line

LOOK_BACK = 4000
"""Lines that are held while no line says which framework wrote them."""
SUMMARY = "train_runtime"
"""A key of what the HF trainer prints once at the end, which is no row."""
LONGEST = 1 << 16
"""Characters of a line that are looked at."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
_RAY = re.compile(r"^\s*\((?:[\w.:\[\]/-]+\s+)?(?:pid=\d+)(?:,\s*ip=[\d.a-fA-F:]+)?\)\s?")
_REPEATED = re.compile(r"\s*\[repeated \d{1,9}x across cluster\].*$")
_PROGRESS = re.compile(r"(\d{1,9})/(\d{1,9}) \[\d{1,4}:")
_FIXED = re.compile(r"[-+]?\d+\.(\d+)")
_WORD = re.compile(r"[A-Za-z_][\w/.@()%\-]*")
_CELL = re.compile(rf"{NUMBER}|-|—|None|null")
_PAIR = re.compile(rf"""\s*[-*•]?\s*['"`]?([A-Za-z_][\w/.@\-]*(?: [\w/.@\-]+)?)['"`]?\s*[:=]\s*({NUMBER})\s*,?\s*""")


def read_text(source: Source, framework: Framework | None = None) -> Collected:
    """The rows and settings of a text; the framework is recognised by its lines unless it is given."""
    collector = Collector(source.name)
    held: list[str] = []
    lines = cleaned(source.lines())
    writer = framework
    for line in lines:
        held.append(line)
        found = from_line(line)
        if found is not None:
            writer = writer or found
            break
        if len(held) >= LOOK_BACK:
            break
    settings, rest = _listened(chain(held, lines))
    rows = writer.console(rest) if writer and writer.console else _loose_rows(rest)
    digits = collector.collected.decimals
    for row in rows:
        _count_digits(row, digits)
        collector.add(row)
    for _ in rest:  # what follows the last row may still be settings
        pass
    collected = collector.finish()
    collected.framework = writer.name if writer else None
    collected.options.update(printed_settings(settings))
    return collected


def cleaned(lines: Iterable[bytes]) -> Iterator[str]:
    """Lines as text, without colours, Ray prefixes and what a progress bar overwrote."""
    for raw in lines:
        text = decoded(raw[:LONGEST])
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        for part in text.rstrip("\r").split("\r") if "\r" in text else (text,):
            if "pid=" in part:
                part = _REPEATED.sub("", _RAY.sub("", part))
            yield part


def _listened(lines: Iterator[str]) -> tuple[list[str], Iterator[str]]:
    """The lines, and a list that fills with those that may print settings while they are taken."""
    kept: list[str] = []
    size = 0

    def passing() -> Iterator[str]:
        nonlocal size
        for line in lines:
            if size < LONGEST and not line.startswith("step:"):
                kept.append(line)
                size += len(line)
            yield line

    return kept, passing()


def _loose_rows(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Rows of printed dicts; where a text has none, of tables and of lines `name: number`."""
    kept: list[str] = []
    found = False
    for row in _printed_dicts(_keeping(lines, kept)):
        found = True
        yield row
    if found:
        return
    table = list(_table_rows(kept))
    yield from _attached(table, list(_pair_rows(kept)))


def _keeping(lines: Iterator[str], kept: list[str]) -> Iterator[str]:
    for line in lines:
        if len(kept) < 10 * LOOK_BACK:
            kept.append(line)
        yield line


def _printed_dicts(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Dicts with more metrics than options. A progress bar before them numbers them."""
    bar: list[float] = []

    def watching() -> Iterator[str]:
        for line in lines:
            if "it" in line or "[" in line:
                for match in _PROGRESS.finditer(line):
                    bar[:] = [float(match[1])]
            yield line

    last = 0.0
    for block in blocks(watching(), r"""\{\s*(?=$|['"])"""):
        items = dict_items(block)
        if not _is_row(items):
            continue
        if "step" not in items and "global_step/max_steps" not in items and bar and bar[0] > last:
            last = bar[0]
            items["step"] = last
        yield items


def _is_row(items: Mapping[str, Any]) -> bool:
    if SUMMARY in items:
        return False
    metrics = sum(is_metric(key) for key in items)
    return metrics >= 1 + ("epoch" in items) and metrics >= sum(is_option(key) for key in items)


def is_metric(key: str) -> bool:
    """Some framework logs this key."""
    return any(framework.find(key) is not None for framework in FRAMEWORKS) or UNKNOWN.find(key) is not None


def _table_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Rows below a line of names of which at least one is a metric, separated by blanks, bars, commas or tabs."""
    names: list[str] = []
    for line in lines:
        cells = [cell for cell in re.split(r"[|│,;\t]|\s+", line.strip()) if cell]
        if names and len(cells) == len(names) and all(_CELL.fullmatch(cell) for cell in cells):
            yield {name: number_text(cell) for name, cell in zip(names, cells, strict=True) if cell not in ("-", "—")}
        elif len(cells) >= 2 and all(_WORD.fullmatch(cell) for cell in cells) and sum(map(is_metric, cells)) >= 1:
            if len(set(cells)) == len(cells) and sum(map(is_metric, cells)) * 2 >= len(cells) - 1:
                names = cells
        elif cells and not all(set(cell) <= set("-:=+─┼╪") for cell in cells):
            names = []


def _pair_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Lines `name: number` that follow one another are one row; a name that comes again begins the next."""
    row: dict[str, Any] = {}
    gap = 0
    for line in lines:
        pair = _PAIR.fullmatch(line)
        if pair and (is_metric(pair[1]) or pair[1] in ("step", "global_step")):
            if pair[1] in row or gap > 2:
                yield row
                row = {}
            row[pair[1]] = number_text(pair[2])
            gap = 0
        else:
            gap += 1
    if row:
        yield row


def _attached(table: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Single numbers of the text around a table belong to the row that shows the same numbers, else to the first."""
    if not table:
        yield from pairs
        return
    for row in pairs:
        if "step" in row:
            table.append(row)
            continue
        known = {value for value in row.values() if value is not None}
        same = [place for place in table if known & set(place.values())]
        target = (same or table)[0]
        for key, value in row.items():
            target.setdefault(key, value)
    yield from table


def _count_digits(row: Mapping[str, Any], digits: dict[str, int]) -> None:
    for key, value in row.items():
        if isinstance(value, str):
            fixed = _FIXED.fullmatch(value)
            count = len(fixed[1]) if fixed else (99 if "e" in value or "E" in value else 0)
            if count > digits.get(key, 0):
                digits[key] = count
