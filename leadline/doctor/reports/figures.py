"""Which plots a report shows: the run in panels, the ledger, and each finding's evidence."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leadline.doctor.reports.curves import reduce
from leadline.doctor.reports.plot import SMALL, Line, Mark, Plot, stacked, svg
from leadline.doctor.reports.words import number
from leadline.doctor.rule import Finding
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import Floats
from leadline.metrics import LEDGER_STAGES, find

LEDGER_POINTS = 300
LEAST_SHOWN = 0.005
"""A stage that never took this share is left out."""
EVIDENCE_CURVES = 3
EVIDENCE_PLOTS = 3
"""At most so many curves in a plot and plots beside a finding, the evidence that is named first before the rest."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its title and legend, ready for the page."""

    title: str
    svg: str
    legend: tuple[tuple[str, int, str], ...]
    """(label, colour number, last value) of each curve."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    curves: Mapping[str, str]
    """Canonical name -> label, the first the most prominent."""
    log: bool | None = None
    anchor: float | None = None


PANELS = (
    _Panel(
        "reward",
        {
            "reward/mean": "mean",
            "reward/group_std": "std in groups",
            "reward/std": "std",
            "eval/reward_mean": "held-out",
            "reward/shaped_mean": "shaped",
        },
    ),
    _Panel("loss", {"loss": "loss", "loss/policy": "policy", "loss/kl": "KL term"}, log=False),
    _Panel(
        "gradient norm", {"optimizer/grad_norm": "before clipping", "optimizer/grad_norm_clipped": "after clipping"}
    ),
    _Panel("KL to the reference", {"kl/k3": "k3", "kl/k1": "k1", "kl/k2": "k2", "kl/max": "largest"}),
    _Panel(
        "importance ratio, trainer / engine",
        {
            "importance/ratio_mean": "mean",
            "importance/ratio_max": "largest",
            "importance/ratio_min": "smallest",
            "importance/sequence_ratio_mean": "mean of sequences",
        },
        log=True,
        anchor=1.0,
    ),
    _Panel(
        "importance weight, as applied",
        {"importance/weight_mean": "mean", "importance/weight_max": "largest", "importance/weight_min": "smallest"},
        log=True,
        anchor=1.0,
    ),
    _Panel(
        "policy ratio, new / old",
        {"policy/ratio_mean": "mean", "policy/ratio_max": "largest", "policy/ratio_min": "smallest"},
        log=True,
        anchor=1.0,
    ),
    _Panel(
        "engine against trainer (nats per token)",
        {
            "importance/log_ratio_abs_mean": "mean |log ratio|",
            "importance/kl_k3": "KL, k3",
            "importance/kl_k1": "KL, k1",
        },
    ),
    _Panel("entropy (nats)", {"policy/entropy": "policy", "rollout/entropy": "sampler"}, anchor=0.0),
    _Panel(
        "completion length (tokens)",
        {"rollout/length_mean": "mean", "rollout/length_max": "longest", "rollout/length_min": "shortest"},
        anchor=0.0,
    ),
    _Panel(
        "shares",
        {
            "rollout/truncated_fraction": "truncated",
            "rollout/zero_signal_fraction": "groups without signal",
            "reward/zero_std_fraction": "groups without spread",
            "policy/clip_fraction": "clipped",
        },
        anchor=0.0,
    ),
    _Panel("learning rate", {"optimizer/learning_rate": "learning rate"}, anchor=0.0),
)
CURVES = 4


def run_figures(run: RunLog, findings: Sequence[Finding]) -> list[Figure]:
    """The panels of which the run logged something, with a mark where each finding begins."""
    marks, steps = onset_marks(findings), _range(run)
    figures = (_panel(panel, run, marks, steps) for panel in PANELS)
    return [figure for figure in figures if figure]


def ledger_figure(run: RunLog, findings: Sequence[Finding]) -> tuple[str, list[tuple[str, str]]] | None:
    """The ledger as stacked area, `reached` at the bottom, and the last share of each stage in it; None if not logged."""
    steps, shares = _ledger(run)
    shown = [(stage, values) for stage, values in shares.items() if any(value > LEAST_SHOWN for value in values)]
    if not shown:
        return None
    drawing = stacked(steps, shown, onset_marks(findings), "where the learning signal went, by step")
    return drawing, [(stage, _last_share(values)) for stage, values in shown]


def _ledger(run: RunLog) -> tuple[list[float], dict[str, list[float]]]:
    """Steps and, by stage, shares at them; of a long run the means over `LEDGER_POINTS` groups of rows."""
    logged = {stage: run.arrays(f"ledger/{stage}_share") for stage in reversed(LEDGER_STAGES)}
    steps = np.unique(np.concatenate([at for at, _ in logged.values()]))
    if not len(steps):
        return [], {}
    groups = np.arange(len(steps)) * min(len(steps), LEDGER_POINTS) // len(steps)
    firsts = steps[np.searchsorted(groups, np.arange(groups[-1] + 1))]
    return firsts.tolist(), {
        stage: _means(groups[np.searchsorted(steps, at)], values, groups[-1] + 1).tolist()
        for stage, (at, values) in logged.items()
    }


def _means(groups: NDArray[np.int64], values: Floats, count: int) -> Floats:
    """The mean of the defined values of each group; NaN for a group without one."""
    defined = np.isfinite(values)
    totals = np.bincount(groups[defined], values[defined], count)
    sizes = np.bincount(groups[defined], minlength=count)
    return np.where(sizes > 0, totals / np.maximum(sizes, 1), np.nan)


def evidence_figures(run: RunLog, finding: Finding, label: str) -> list[Figure]:
    """The curves that a finding's evidence is about, with their limits and the finding's onset; those that share a
    meaning and a unit share a plot. Empty if none of them is in the log."""
    waiting = list(dict.fromkeys(item.metric for item in finding.evidence if numbers(run, item.metric)))
    figures: list[Figure] = []
    while waiting and len(figures) < EVIDENCE_PLOTS:
        together = [name for name in waiting if _alike(waiting[0], name)][:EVIDENCE_CURVES]
        waiting = [name for name in waiting if name not in together]
        figures.append(_evidence(run, finding, together, label))
    return figures


def _evidence(run: RunLog, finding: Finding, names: Sequence[str], label: str) -> Figure:
    first = find(names[0])
    lines = tuple(Line(name, numbers(run, name), index) for index, name in enumerate(names, start=1))
    plot = Plot(
        lines,
        marks=(Mark(finding.step, label, finding.severity),) if finding.step else (),
        band=first.healthy if first else None,
        limits=tuple(dict.fromkeys(item.limit for item in finding.evidence if item.metric in names)),
        log=True if first and re.search(r"(?<!log_)ratio_(mean|min|max)", first.name) else None,
        steps=_range(run),
    )
    note = first.meaning if first else ""
    return Figure(", ".join(names), svg(plot, f"{', '.join(names)} by step"), _legend(lines), note)


def onset_marks(findings: Sequence[Finding]) -> tuple[Mark, ...]:
    """One mark per step at which findings begin, labelled with their numbers."""
    at: dict[float, list[int]] = {}
    for index, finding in enumerate(findings, start=1):
        if finding.step:  # 0 is that of settings
            at.setdefault(finding.step, []).append(index)
    return tuple(
        Mark(step, ",".join(map(str, which)), "error" if _any_error(findings, which) else "warning")
        for step, which in sorted(at.items())
    )


def numbers(run: RunLog, name: str) -> list[tuple[float, float]]:
    """(step, value) of what was logged, NaN included; of a long log as few as `reduce` keeps."""
    return reduce(*run.arrays(name))


def _any_error(findings: Sequence[Finding], which: Sequence[int]) -> bool:
    return any(findings[index - 1].severity == "error" for index in which)


def _alike(name: str, other: str) -> bool:
    """Whether two quantities may share an axis: same family, same unit."""
    one, two = find(name), find(other)
    return name == other or (
        one is not None and two is not None and one.unit == two.unit and name.split("/")[0] == other.split("/")[0]
    )


def _range(run: RunLog) -> tuple[float, float]:
    """First and last step: rows come in the order of steps."""
    if not run.rows:
        return 0, 0
    ends = int(run.rows[0]["step"]), int(run.rows[-1]["step"])
    return min(ends), max(ends)


def _panel(panel: _Panel, run: RunLog, marks: tuple[Mark, ...], steps: tuple[float, float]) -> Figure | None:
    found = [(name, points) for name in panel.curves if (points := numbers(run, name))][:CURVES]
    if not found:
        return None
    lines = tuple(Line(panel.curves[name], points, color) for color, (name, points) in enumerate(found, start=1))
    first = find(found[0][0])
    plot = Plot(lines, marks, first.healthy if first else None, (), panel.log, panel.anchor, steps)
    return Figure(
        panel.title, svg(plot, f"{panel.title} by step", SMALL), _legend(lines), first.meaning if first else ""
    )


def _legend(lines: Sequence[Line]) -> tuple[tuple[str, int, str], ...]:
    return tuple((line.label, line.color, number(line.points[-1][1])) for line in lines)


def _last_share(values: Sequence[float]) -> str:
    defined = [value for value in values if math.isfinite(value)]
    return f"{abs(round(100 * defined[-1]))} %" if defined else "n/a"
