"""The report of the engine probe: on the screen, and as JSON."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leadline.probes.engine.attribute import Attribution
from leadline.probes.engine.causes import BY_NAME
from leadline.probes.engine.gap import Bin, Gap
from leadline.probes.engine.probe import Report
from leadline.probes.engine.readings import KNOBS
from leadline.probes.engine.scoring import PLAIN
from leadline.probes.engine.shares import shares
from leadline.settings.rollout import Sampling

SHOWN_FITS = 6
BAR = 10
WIDTH = 110
SIZES: dict[str, Callable[[Gap], str]] = {
    "mean Δ": lambda gap: f"{gap.mean:+.2g}",
    "median |Δ|": lambda gap: _nats(gap.median_abs),
    "90 %, 99 % of |Δ|": lambda gap: f"{gap.p90:.2g}, {gap.p99:.2g}",
    "largest |Δ|": lambda gap: _nats(gap.max_abs),
    "share with Δ < 0": lambda gap: f"{gap.negative:.0%}",
    "sum over a completion": lambda gap: f"{gap.sequence_mean:+.2g}",
    "smallest and largest sum": lambda gap: f"{gap.sequence_min:+.2g}, {gap.sequence_max:+.2g}",
    "correlation with log μ": lambda gap: f"{gap.engine_correlation:+.2f}",
    "with the entropy": lambda gap: f"{gap.entropy_correlation:+.2f}",
    "of |Δ| with the position": lambda gap: f"{gap.position_correlation:+.2f}",
}


def print_report(report: Report, console: Console | None = None) -> None:
    """Everything a person needs to believe the verdict, the verdict first."""
    out = console or Console(highlight=False)
    out.print(_heading(report))
    out.print(_finding(report.attribution))
    if report.recorded is not None:
        out.print(_section("The trainer's recorded logprobs, against the policy", _recorded(report.recorded)))
    for part in _details(report.attribution):
        out.print(part)


def to_json(report: Report) -> str:
    """The whole report; a number that is not defined is null."""
    values = {
        "verdict": report.attribution.verdict.cause,
        "exit_code": report.exit_code,
        "fix": BY_NAME[report.attribution.verdict.cause].fix,
        "source": report.source,
        "model": report.model,
        "sampling": report.sampling.model_dump(mode="json") if report.sampling else None,
        "dtypes": report.dtypes,
        "seconds": report.seconds,
        "engine": _as_dict(report.attribution),
        "trainer": _as_dict(report.recorded) if report.recorded else None,
    }
    return json.dumps(_without_nan(values), indent=2, ensure_ascii=False)


def _as_dict(found: Attribution) -> dict[str, Any]:
    return {**asdict(found), "shares": asdict(shares(found)), "noise_floor": found.rounding.floor}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The screen -----------------------------------------------------------------------------------------------------------


def _heading(report: Report) -> Text:
    gap = report.attribution.gap
    line = Text.assemble((report.source, "bold"), " against ", (report.model or "the trainer's own column", "bold"))
    facts = [
        f"{gap.completions} completions",
        f"{gap.tokens} tokens",
        *([f"{gap.unscored} unscored"] if gap.unscored else []),
    ]
    if report.sampling is not None:
        facts.append(", ".join(_knobs(report.sampling)))
    if report.dtypes:
        trained, served = report.dtypes
        facts.append(f"trained in {trained}, served in {served}" if trained != served else trained)
    return line.append(f"\n{' · '.join(facts)} · {report.seconds:.0f} s\n", style="dim")


def _knobs(sampling: Sampling) -> list[str]:
    values = {knob: getattr(sampling, knob) for knob in KNOBS}
    return [f"{k} {v:g}" for k, v in values.items() if v != getattr(PLAIN, k)] or ["temperature 1"]


def _finding(found: Attribution) -> RenderableType:
    verdict, cause = found.verdict, BY_NAME[found.verdict.cause]
    style = {"noise": "bold green", "unexplained": "bold yellow"}.get(verdict.cause, "bold red")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(max_width=WIDTH)
    table.add_row("verdict", Text.assemble((verdict.cause, style), "  ", cause.meaning))
    if verdict.detail and verdict.cause != "noise":
        table.add_row("", verdict.detail)
    if verdict.second:
        second = BY_NAME[verdict.second]
        table.add_row("and", Text.assemble((second.name, style), "  ", second.meaning))
    table.add_row("evidence", _evidence(found))
    if cause.fix:
        table.add_row("fix", Text(cause.fix, style="bold"))
    if verdict.second:
        table.add_row("", Text(BY_NAME[verdict.second].fix, style="bold"))
    parts = shares(found)
    table.add_row(
        "of which", f"numerics {_nats(parts.numerics)} · staleness {_nats(parts.staleness)} · bug {_nats(parts.bug)}"
    )
    return table


def _recorded(found: Attribution) -> Text:
    """What the trainer wrote down, compared with what the policy gives."""
    size, verdict = f"mean |Δ| {_nats(found.gap.mean_abs)} nats a token", found.verdict
    if verdict.cause == "noise":
        return Text(f"They are the policy's ({size}): what is off is the engine's side.")
    if math.isnan(verdict.explained) or verdict.cause == "unexplained":
        return Text(
            f"They are not the policy's ({size}; {verdict.cause}): is --model what scored them?", style="yellow"
        )
    return Text(
        f"They are not the policy's ({size}), but as if: {verdict.detail} ({verdict.cause}), which explains "
        f"{_percent(verdict.explained)}.",
        style="bold red",
    )


def _evidence(found: Attribution) -> str:
    gap, verdict = found.gap, found.verdict
    size = f"mean |Δ| {_nats(gap.mean_abs)} nats a token (Δ = trainer − engine)"
    if verdict.cause == "noise":
        return f"{size}; up to {_nats(found.rounding.floor)} is rounding"
    if math.isnan(verdict.explained):
        return f"{size}; told by its marks, not by an experiment"
    if verdict.cause == "unexplained":
        marks = "; ".join(f"{mark.cause}: {mark.reason}" for mark in found.marks)
        return f"{size}; it has the marks of {marks}" if marks else size
    return f"{size}; undoing this explains {_percent(verdict.explained)} of it and leaves {_nats(verdict.left)}"


def _details(found: Attribution) -> Iterator[RenderableType]:
    yield _section("The gap in nats a token", _sizes(found))
    profile = Table.grid(padding=(0, 3))
    profile.add_row(
        _bins("position", found.gap.by_position, "{:.0f}"), _bins("entropy", found.gap.by_entropy, "{:.2f}")
    )
    yield _section("Where it is: mean |Δ|, and the sign", profile)
    yield _section(
        f"What a correction would do to completions of {found.gap.mean_length:.0f} tokens", _corrections(found.gap)
    )
    if found.fits and found.verdict.cause != "noise":
        yield _section("What was tried: the share of the gap that undoing it closes", _tried(found))
    if found.not_checked:
        yield _section("Not checked", Text("\n".join(f"· {line}" for line in found.not_checked), style="dim"))


def _section(title: str, body: RenderableType) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2)))


def _sizes(found: Attribution) -> Table:
    gaps = [("float32 policy", found.gap), *([("training dtype", found.trained)] if found.trained else [])]
    table = _table("", *(name for name, _ in gaps), *(f"{dtype} rounding" for dtype in found.rounding.by_dtype))
    rounding = [_nats(size) for size in found.rounding.by_dtype.values()]
    table.add_row("mean |Δ|", *(_nats(gap.mean_abs) for _, gap in gaps), *rounding)
    for name, measure in SIZES.items():
        table.add_row(name, *(measure(gap) for _, gap in gaps))
    return table


def _bins(title: str, bins: Sequence[Bin], form: str) -> Table:
    table = Table.grid(padding=(0, 1))
    largest = max((one.mean_abs for one in bins), default=0.0) or 1.0
    for i, one in enumerate(bins):
        span = f"{form.format(one.low)}–{form.format(one.high)}"
        bar = "█" * max(1, round(BAR * one.mean_abs / largest))
        sign = "+" if one.mean > 0.2 * one.mean_abs else "−" if one.mean < -0.2 * one.mean_abs else "±"
        table.add_row(title if i == 0 else "", span, Text(bar, style="cyan"), f"{one.mean_abs:.2g} {sign}")
    return table


def _corrections(gap: Gap) -> Table:
    table = _table("correction", "bounds", "masked", "at a bound", "mean weight", "ESS")
    for one in gap.corrections:
        style = "red" if one.masked > 0.5 or one.mean_weight < 0.5 else ""
        values = (_percent(one.masked), _percent(one.truncated), f"{one.mean_weight:.3g}", _percent(one.ess))
        table.add_row(f"{one.level} {one.action}", f"{one.low:g} … {one.high:g}", *values, style=style)
    return table


def _tried(found: Attribution) -> Table:
    table = _table("cause", "exactly", "closes", "leaves", "slope")
    best = {one.cause: one for one in reversed(found.fits) if not one.second}
    shown = sorted(best.values(), key=found.fits.index)
    for one in shown[:SHOWN_FITS]:
        closes = _percent(one.explained) if one.explained > 0 else "–"
        table.add_row(
            one.cause, one.detail, closes, _nats(one.left), f"{one.slope:.2f}", style="bold" if one.fits else "dim"
        )
    if rest := [one.cause for one in shown[SHOWN_FITS:]]:
        table.add_row(Text("ruled out", style="dim"), Text(", ".join(rest), style="dim"))
    return table


def _table(*columns: str) -> Table:
    """The first column and words to the left, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for place, column in enumerate(columns):
        left = place == 0 or column in ("exactly", "bounds")
        table.add_column(column, justify="left" if left else "right", no_wrap=place == 0)
    return table


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.1%}" if 0.001 <= share < 0.9995 else f"{share:.0%}"


def _nats(value: float) -> str:
    return f"{value:.2g}"
