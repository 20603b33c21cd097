"""The parts of the live screen: plain functions from what is known of a run to something rich can draw."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from leadline.doctor.rule import Finding
from leadline.loop.waiting import bottleneck
from leadline.metrics import LEDGER_STAGES, find
from leadline.numerals import duration, number, share

ACCENT, GOOD, BAD, ODD, DIM = "#5fafd7", "#5faf5f", "#ff5f5f", "#ffaf5f", "#8a8a8a"

STAGE_COLORS: dict[str, str] = {
    "failed": "#d70000",
    "no_signal": "#767676",
    "stale": "#af5faf",
    "truncated": "#ff8700",
    "unscored": "#d787d7",
    "low_entropy": "#5f87af",
    "importance_masked": "#ff5f5f",
    "importance_shrunk": "#d78787",
    "clipped": "#5fd7d7",
    "ratio_drift": "#8787ff",
    "discarded": "#ff005f",
    "reached": GOOD,
}
LEGEND_FROM = 0.005
NARROW = 72
"""Below this width panels stand below each other."""
TOP_HEIGHT, MIDDLE_HEIGHT = 8, 10
STEP_PARTS = {
    "wait_for_rollouts": "rollouts",
    "score": "score",
    "update": "update",
    "load_weights": "load weights",
}
"""What a step is made of, by the middle of its metric's name: how long the trainer waits, then what it does."""
AGES_SHOWN = 4
RECENT_STEPS = 10
"""Who waits for whom is judged by so many last steps."""
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class View:
    """What the screen knows. `metrics` is the last row of a trained step."""

    heading: str
    steps: int
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    recent: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The rows of the last trained steps."""
    curve: list[float] = field(default_factory=list)
    """Of every step so far: the mean reward (the loss, where there are no rewards)."""
    held_out: list[float] = field(default_factory=list)
    """The same on held-out prompts, of every evaluation so far."""
    findings: Sequence[tuple[Finding, bool]] = ()
    """Each with whether it holds at the last step, or held a few steps ago."""
    stage: str = "start"
    stage_seconds: float = 0.0
    step_seconds: float | None = None

    @property
    def remaining_seconds(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds * max(0, self.steps - self.step)


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of blocks, one column per value, or `width` columns of means; NaN is blank."""
    columns = list(_downsampled(values, width))
    finite = [value for value in columns if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    eighths = [1 + round((value - low) * scale) if math.isfinite(value) else 0 for value in columns]
    rows = [[BLOCKS[min(8, max(0, count - 8 * row))] for count in eighths] for row in range(height)]
    return ["".join(row) for row in reversed(rows)]


def _downsampled(values: Sequence[float], width: int) -> Iterator[float]:
    columns = min(len(values), max(1, width))
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in part if math.isfinite(value)]
        yield sum(finite) / len(finite) if finite else math.nan


def bar_cells(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """Cells per stage, `width` in all, by largest remainder, and one at least for a stage that the legend names.

    Negative and undefined shares get nothing.
    """
    positive = {stage: value for stage, value in shares.items() if value > 0}
    total = sum(positive.values())
    exact = {stage: width * value / total for stage, value in positive.items()}
    cells = {stage: int(value) for stage, value in exact.items()}
    by_remainder = sorted(exact, key=lambda stage: cells[stage] - exact[stage])
    for stage in by_remainder[: width - sum(cells.values())]:
        cells[stage] += 1
    for stage in [stage for stage, count in cells.items() if not count and positive[stage] > LEGEND_FROM]:
        cells[max(cells, key=lambda stage: cells[stage])] -= 1
        cells[stage] = 1
    return cells


def screen(view: View, console: Console) -> RenderableType:
    """Everything: progress, reward, ledger, policy, completions and time, findings."""
    pairs = [(reward(view), ledger(view)), (policy(view), work(view))]
    known = _ages(view.metrics)
    free = console.height - 3 - (TOP_HEIGHT + MIDDLE_HEIGHT) * (2 if console.width < NARROW else 1)
    free -= 2 + len(known) if known else 0
    parts = [progress(view), *(beside(left, right, console) for left, right in pairs)]
    return Group(*parts, *([ages(view)] if known else []), findings(view, free))


def beside(left: RenderableType, right: RenderableType, console: Console) -> RenderableType:
    """Two panels side by side, or one below the other where the terminal is narrow."""
    if console.width < NARROW:
        return Group(left, right)
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def panel(title: str, body: RenderableType, height: int | None = None, color: str = "#4e4e4e") -> Panel:
    """A box with its title."""
    heading = Text(title, style=f"bold {ACCENT}")
    return Panel(body, title=heading, title_align="left", border_style=color, height=height, padding=(0, 1))


def progress(view: View) -> Panel:
    """Which run it is, how far it is, and how long it will take."""
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for ratio in (None, 1, None, None):
        grid.add_column(ratio=ratio, no_wrap=True)
    frame = FRAMES[int(view.stage_seconds * 8) % len(FRAMES)]
    grid.add_row(
        Text.assemble("step ", (f"{view.step}", "bold"), f"/{view.steps}"),
        ProgressBar(total=view.steps, completed=view.step, complete_style=ACCENT, finished_style=GOOD),
        Text(f"{duration(view.step_seconds)}/step, {duration(view.remaining_seconds)} left", style=DIM),
        Text.assemble((f"{frame} ", ACCENT), view.stage, (f" {duration(view.stage_seconds)}", DIM)),
    )
    return panel(f"leadline · {view.heading}", grid)


class Chart:
    """A value of every step, as wide as there is room, with the highest and lowest column's value beside it."""

    def __init__(self, values: Sequence[float], height: int) -> None:
        self.values, self.height = values, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 8
        columns = [value for value in _downsampled(self.values, width) if math.isfinite(value)]
        labels = [""] * self.height
        if columns:
            labels[0], labels[-1] = f"{max(columns):.3g}", f"{min(columns):.3g}"
        for line, label in zip(chart(self.values, width, self.height), labels, strict=True):
            yield Text.assemble((line.ljust(width), GOOD), (label.rjust(8), DIM), no_wrap=True, end="\n")


def reward(view: View) -> Panel:
    """The rewards of the last step and of the run, with the held-out ones."""
    metrics = view.metrics
    facts = Text.assemble(
        (number(metrics.get("reward/mean")), "bold"),
        (" ± ", DIM), number(metrics.get("reward/std")),
        ("   within groups ± ", DIM), number(metrics.get("reward/group_std")),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    last = Text("held-out –", style=DIM)
    if view.held_out:
        path = " → ".join(number(value) for value in [view.held_out[0], *view.held_out[1:][-1:]])
        last = Text.assemble(("held-out ", DIM), path)
    return panel("reward", Group(facts, Chart(view.curve, TOP_HEIGHT - 4), last), TOP_HEIGHT)


class _Bar:
    """The ledger as one bar."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = bar_cells(self.shares, options.max_width)
        parts = [("█" * count, STAGE_COLORS[stage]) for stage, count in cells.items()]
        yield Text.assemble(*parts or [("░" * options.max_width, DIM)], no_wrap=True)


def ledger(view: View) -> Panel:
    """Where the learning signal went, by stage."""
    metrics = view.metrics
    shares = {stage: metrics.get(f"ledger/{stage}_share", math.nan) for stage in reversed(LEDGER_STAGES)}
    tokens = [number(metrics.get(f"ledger/{name}_tokens")) for name in ("reached", "sampled")]
    reached = metrics.get("ledger/reached_share")
    headline = Text.assemble(
        (share(reached), f"bold {GOOD if reached is not None and reached >= 0.5 else BAD}"),
        (f" reached · {tokens[0]}/{tokens[1]} tokens", DIM), no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    if reached is not None and math.isnan(reached):
        headline = Text("no group carries a signal", style=f"bold {ODD}")
    entries = [
        Text.assemble(("■ ", STAGE_COLORS[stage]), stage.replace("_", " "), (f" {share(value)}", DIM))
        for stage, value in sorted(shares.items(), key=lambda item: -item[1])
        if abs(value) > LEGEND_FROM
    ]
    legend = Columns(entries, padding=(0, 3))
    return panel("where the signal went", Group(headline, _Bar(shares), _Bar(shares), legend), TOP_HEIGHT)


def facts_grid() -> Table:
    """Rows of a name, a value and a remark."""
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, width=13, style=DIM)
    grid.add_column(no_wrap=True, width=8, justify="right")
    grid.add_column(no_wrap=True, ratio=1, style=DIM)
    return grid


def valued(metrics: Mapping[str, float], name: str, shown: str | None = None) -> Text:
    """The value, coloured if it is outside its healthy band."""
    value = metrics.get(name)
    quantity = find(name)
    if value is None or math.isnan(value):
        return Text(number(value), style=DIM)
    band = quantity.healthy if quantity else None
    sick = band is not None and not band[0] <= value <= band[1]
    return Text(shown or number(value), style=f"bold {BAD}" if sick else "")


def _range(metrics: Mapping[str, float], stem: str) -> str:
    return f"{number(metrics.get(f'{stem}_min'))} … {number(metrics.get(f'{stem}_max'))}"


def policy(view: View) -> Panel:
    """How far the policy has moved, and how it agrees with the engine."""
    m, grid = view.metrics, facts_grid()
    ess, clipped = m.get("importance/ess"), m.get("policy/clip_fraction")
    grid.add_row("importance", valued(m, "importance/ratio_mean"), _range(m, "importance/ratio"))
    grid.add_row("engine KL", valued(m, "importance/kl_k3"), f"ESS {share(ess)}")
    grid.add_row("policy ratio", valued(m, "policy/ratio_mean"), f"{share(clipped)} clipped")
    grid.add_row("KL to old", valued(m, "policy/kl_old"), "nats")
    grid.add_row("KL to ref", valued(m, "kl/k3"), "nats")
    grid.add_row("entropy", valued(m, "policy/entropy"), "nats")
    grid.add_row("grad norm", valued(m, "optimizer/grad_norm"), f"moved {number(m.get('optimizer/update_norm'))}")
    grid.add_row("learning rate", valued(m, "optimizer/learning_rate"), f"loss {number(m.get('loss'))}")
    return panel("policy and engine", grid, MIDDLE_HEIGHT)


def work(view: View) -> Panel:
    """Completions and time of the last step."""
    m, grid = view.metrics, facts_grid()
    none = m.get("rollout/zero_signal_fraction")
    grid.add_row("length", valued(m, "rollout/length_mean"), f"{_range(m, 'rollout/length')} tokens")
    cut = m.get("rollout/truncated_fraction")
    failed = share(m.get("rollout/failed_fraction"))
    grid.add_row("truncated", valued(m, "rollout/truncated_fraction", share(cut)), f"{failed} failed")
    grid.add_row("no signal", valued(m, "rollout/zero_signal_fraction", share(none)), "of the groups")
    grid.add_row("staleness", valued(m, "staleness/mean"), f"max {number(m.get('staleness/max'))}")
    if waiting := bottleneck(view.recent):
        grid.add_row(f"{waiting.who} waits", share(waiting.share), f"on {waiting.waits_for}")
    parts = {name: m[f"time/{name}_s"] for name in STEP_PARTS if m.get(f"time/{name}_s", 0) > 0}
    for name in sorted(parts, key=lambda part: -parts[part])[: MIDDLE_HEIGHT - 2 - grid.row_count]:
        bar = ProgressBar(sum(parts.values()), parts[name], complete_style=ACCENT)
        grid.add_row(STEP_PARTS[name], duration(parts[name]), bar)
    return panel("completions and time", grid, MIDDLE_HEIGHT)


def _ages(metrics: Mapping[str, float]) -> list[str]:
    """The ages that the step had tokens of, as the metrics name them: the youngest, and the oldest."""
    known = [name.split("/")[1] for name in metrics if name.startswith("staleness/age_") and name.endswith("/tokens")]
    return known if len(known) <= AGES_SHOWN else [*known[: AGES_SHOWN - 1], known[-1]]


def ages(view: View) -> Panel:
    """How far engine and policy are apart on tokens of each age, where the engine runs ahead."""
    m, grid = view.metrics, Table.grid(padding=(0, 2, 0, 0))
    for age in _ages(m):
        of = {what: m.get(f"staleness/{age}/{what}") for what in ("tokens", "log_ratio_abs_mean", "ess", "weight_mean")}
        grid.add_row(
            Text(age.replace("_", " "), style=DIM),
            f"{number(of['tokens'])} tokens",
            f"|Δ| {number(of['log_ratio_abs_mean'])}",
            f"ESS {share(of['ess'])}",
            f"weight {number(of['weight_mean'])}",
        )
    return panel(f"tokens by age · overlap {share(m.get('time/overlap_share'))} of the step", grid)


def findings(view: View, height: int) -> Panel:
    """The first finding in full, as far as there is room, and the others by their titles."""
    if not view.findings:
        return panel("findings", Text("no rule fires", style=GOOD), color=GOOD)
    first, *others = sorted(view.findings, key=lambda item: (not item[1], item[0].severity != "error"))
    body: list[RenderableType] = [_Clipped(_explained(*first), max(4, height - 2 - len(others)))]
    body += [_titled(*other) for other in others]
    return panel("findings", Group(*body), color=_color(*first))


def _color(finding: Finding, holds: bool) -> str:
    return DIM if not holds else BAD if finding.severity == "error" else ODD


def _titled(finding: Finding, holds: bool) -> Text:
    color = _color(finding, holds)
    when = "" if holds else f"  (step {finding.step})"
    return Text.assemble(
        ("● ", color), (f"{finding.rule} ", DIM), (finding.title, f"bold {color}"), (when, DIM),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _explained(finding: Finding, holds: bool) -> list[Text]:
    return [_titled(finding, holds), Text(finding.message), Text.assemble(("→ ", GOOD), finding.fix.replace("`", ""))]


class _Clipped:
    """Wrapped texts, cut after so many lines."""

    def __init__(self, texts: Sequence[Text], lines: int) -> None:
        self.texts, self.lines = texts, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title, *rest = self.texts
        yield title
        wrapped = [line for text in rest for line in text.wrap(console, options.max_width)]
        if len(wrapped) >= self.lines:
            wrapped = [*wrapped[: self.lines - 2], Text("… (findings.jsonl has the rest)", style=DIM)]
        yield from wrapped
