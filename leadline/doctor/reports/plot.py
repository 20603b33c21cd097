"""Plots as inline SVG. Colours come from the page's CSS variables, so that one picture suits light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from leadline.doctor.reports.curves import Point, segments, undefined
from leadline.doctor.reports.scales import Scale, fit, whole_ticks
from leadline.doctor.reports.words import number

WIDTH, HEIGHT = 440, 176
SMALL = 356, 158
"""The same for a panel among others: text has the same size on the page."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 18, 24
DOTTED = 40
"""Up to so many points each is drawn as a dot that says its value under the pointer."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. `color` is the number of a CSS variable, 1 the most prominent."""

    label: str
    points: Sequence[Point]
    color: int = 1
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step, with a short label above it: where a finding begins."""

    step: float
    label: str
    severity: str = "error"


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn, before it is. `log` None: decided by the values."""

    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    band: tuple[float, float] | None = None
    """The healthy range, shaded as far as it is in sight."""
    limits: tuple[float, ...] = ()
    log: bool | None = None
    anchor: float | None = None
    steps: tuple[float, float] | None = None
    """The range of the step axis; None: that of the lines."""


@dataclass(frozen=True, slots=True)
class _Paper:
    """Where steps and values lie."""

    x: Scale
    y: Scale
    width: int
    height: int

    def across(self, step: float) -> float:
        return round(LEFT + self.x(step) * (self.width - LEFT - RIGHT), 1)

    def down(self, value: float) -> float:
        return round(TOP + (1 - self.y(value)) * (self.height - TOP - BOTTOM), 1)

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM


def svg(plot: Plot, label: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    """The plot as an `<svg>` element; `label` is what a screen reader says."""
    limits = [limit for limit in plot.limits if math.isfinite(limit)]
    values = [value for line in plot.lines for _, value in line.points]
    y = fit([*values, *limits], plot.log, plot.anchor)
    paper = _Paper(_step_scale(plot), y, *size)
    parts = [
        *_band(plot.band, paper),
        *_axes(paper),
        *(_limit(limit, paper) for limit in limits),
        *(part for mark in plot.marks for part in _mark(mark, paper)),
        *(part for line in reversed(plot.lines) for part in _curve(line, paper)),
        *_gaps(plot.lines, paper),
    ]
    return _element(parts, label, paper)


def stacked(
    steps: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], marks: Sequence[Mark], label: str
) -> str:
    """Shares of 0 to 1 stacked on each other, one (name, values) layer upon the last; `name` is the CSS class suffix.

    Negative shares count as 0. Where nothing is defined, nothing is drawn.
    """
    paper = _Paper(_scale_of_steps(steps[0], steps[-1]), Scale(0.0, 1.0), 920, 200)
    edges = list(steps) if len(steps) > 1 else [steps[0] - 0.5, steps[0] + 0.5]
    floor = [0.0] * len(steps)
    parts = _axes(paper)
    for name, values in layers:
        roof = [
            low + max(0.0, value) if math.isfinite(value) else math.nan
            for low, value in zip(floor, values, strict=True)
        ]
        for first, last in _defined_runs(roof):
            parts.append(_area(name, edges, floor, roof, (first, last), paper))
        floor = [high if math.isfinite(high) else low for low, high in zip(floor, roof, strict=True)]
    parts += [part for mark in marks for part in _mark(mark, paper)]
    return _element(parts, label, paper)


def _defined_runs(values: Sequence[float]) -> list[tuple[int, int]]:
    """First and last index of each unbroken run of finite values."""
    runs: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _area(
    name: str,
    steps: Sequence[float],
    floor: Sequence[float],
    roof: Sequence[float],
    ends: tuple[int, int],
    paper: _Paper,
) -> str:
    first, last = ends
    places = list(range(first, last + 1))
    if first == last:  # a lone value is drawn as wide as half the way to its neighbours, so that it is seen
        return _bar(name, steps, floor[first], roof[first], first, paper)
    above = [f"{paper.across(steps[i])},{paper.down(roof[i])}" for i in places]
    below = [f"{paper.across(steps[i])},{paper.down(floor[i])}" for i in reversed(places)]
    return (
        f'<polygon class="stage {name}" points="{" ".join([*above, *below])}"><title>{escape(name)}</title></polygon>'
    )


def _bar(name: str, steps: Sequence[float], low: float, high: float, index: int, paper: _Paper) -> str:
    left = paper.across(steps[max(0, index - 1)] if len(steps) > 2 else steps[0])
    right = paper.across(steps[min(len(steps) - 1, index + 1)])
    top, bottom = paper.down(high), paper.down(low)
    shape = f'x="{left}" y="{top}" width="{max(2.0, round(right - left, 1))}" height="{round(bottom - top, 1)}"'
    return f'<rect class="stage {name}" {shape}><title>{escape(name)}</title></rect>'


def _step_scale(plot: Plot) -> Scale:
    steps = [step for line in plot.lines for step, _ in line.points] or [0.0]
    return _scale_of_steps(*(plot.steps or (min(steps), max(steps))))


def _scale_of_steps(first: float, last: float) -> Scale:
    return Scale(first, last) if last > first else Scale(first - 0.5, first + 0.5)


def _axes(paper: _Paper) -> list[str]:
    right = paper.width - RIGHT
    parts = []
    for value in paper.y.ticks():
        at = paper.down(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5}" text-anchor="end">{number(value)}</text>')
    for step in whole_ticks(math.ceil(paper.x.low), math.floor(paper.x.high)):
        at = paper.across(step)
        parts.append(f'<text class="tick" x="{at}" y="{paper.height - 8}" text-anchor="middle">{step}</text>')
    parts.append(f'<text class="tick" x="{LEFT - 6}" y="{paper.height - 8}" text-anchor="end">step</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{paper.bottom}" y2="{paper.bottom}"/>')
    return parts


def _band(band: tuple[float, float] | None, paper: _Paper) -> list[str]:
    if band is None or band[1] < paper.y.low or band[0] > paper.y.high:
        return []
    top, bottom = paper.down(band[1]), paper.down(band[0])
    shape = f'x="{LEFT}" y="{top}" width="{paper.width - LEFT - RIGHT}" height="{max(1.0, round(bottom - top, 1))}"'
    return [f'<rect class="band" {shape}><title>healthy: {number(band[0])} to {number(band[1])}</title></rect>']


def _limit(limit: float, paper: _Paper) -> str:
    if paper.y.log and limit <= 0:
        return ""
    at = paper.down(limit)
    text = f"<title>limit {number(limit)}</title>"
    return f'<line class="limit" x1="{LEFT}" x2="{paper.width - RIGHT}" y1="{at}" y2="{at}">{text}</line>'


def _mark(mark: Mark, paper: _Paper) -> list[str]:
    if not paper.x.low <= mark.step <= paper.x.high:
        return []
    at = paper.across(mark.step)
    kind = "error" if mark.severity == "error" else "warning"
    return [
        f'<line class="mark {kind}" x1="{at}" x2="{at}" y1="{TOP - 4}" y2="{paper.bottom}"/>',
        f'<text class="mark {kind}" x="{at}" y="{TOP - 7}" text-anchor="middle">{escape(mark.label)}</text>',
    ]


def _curve(line: Line, paper: _Paper) -> list[str]:
    kept = list(line.points)
    if paper.y.log:
        kept = [(step, value if value > 0 else math.nan) for step, value in kept]
    kind = f"c{line.color}" + (" faint" if line.faint else "")
    parts = []
    for piece in segments(kept):
        places = [f"{paper.across(step)},{paper.down(value)}" for step, value in piece]
        if len(piece) > 1:
            parts.append(f'<polyline class="curve {kind}" points="{" ".join(places)}"/>')
        if len(piece) == 1 or len(kept) <= DOTTED:
            parts += [_dot(step, value, line.label, kind, paper) for step, value in piece]
    return parts


def _dot(step: float, value: float, label: str, kind: str, paper: _Paper) -> str:
    words = f"{label} at step {number(step)}: {number(value)}"
    place = f'cx="{paper.across(step)}" cy="{paper.down(value)}"'
    return f'<circle class="dot {kind}" {place} r="2.4"><title>{escape(words)}</title></circle>'


def _gaps(lines: Sequence[Line], paper: _Paper) -> list[str]:
    """A triangle on the axis wherever a value is NaN or infinite: a curve that only breaks off hides it."""
    steps = sorted({step for line in lines for step in undefined(line.points)})
    y = paper.bottom
    return [
        f'<path class="nan" d="M{x} {y - 8}l4.5 8h-9z"><title>not finite at step {number(step)}</title></path>'
        for step in steps
        for x in [paper.across(step)]
    ]


def _element(parts: Sequence[str], label: str, paper: _Paper) -> str:
    frame = f'viewBox="0 0 {paper.width} {paper.height}" role="img" aria-label="{escape(label)}"'
    return f"<svg {frame}>{''.join(parts)}</svg>"
