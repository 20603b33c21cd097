"""What a person sees while a run trains: a live screen in a terminal, one line per step elsewhere."""

import io
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from leadline.config import Config
from leadline.doctor.rule import Finding
from leadline.loop.waiting import Bottleneck, bottleneck
from leadline.numerals import duration, number, share
from leadline.panels import View, screen
from leadline.sft.config import AnyConfig

REMEMBERED_STEPS = 10
"""A finding that no longer holds is still shown, dimmed, for so many steps."""
TIMED_STEPS = 20
"""The time left is judged by so many last steps."""


@dataclass(frozen=True, slots=True)
class Face:
    """What a screen shows of a kind of run."""

    title: str
    heading: str
    curve: str
    """The metric that every trained step has; it is drawn."""
    held_out: str
    """The metric of an evaluation that is shown beside it."""
    words: Mapping[str, str]
    """How a step reads on a line: words around a value -> its metric."""
    draw: Callable[[View, Console], RenderableType]


class Screen:
    """The face of a run. A context manager; `show` once a step.

    `rows` are the metrics so far of a run that is resumed. A value that is NaN reads `n/a`, one that was not measured
    is a dash (live) or left out (lines).
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        face: Face | None = None,
        console: Console | None = None,
        rows: Sequence[Mapping[str, float]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.face = face or _training_face(config)
        self.view = View(self.face.heading, config.run.steps)
        self._clock = clock
        self._stage_since = self._step_since = clock()
        self._durations: deque[float] = deque(maxlen=TIMED_STEPS)
        self._seen: dict[str, tuple[Finding, int]] = {}
        self._live = None if _is_plain(self.console) else self._make_live()
        self.restore(rows)

    def __enter__(self) -> Self:
        self._stage_since = self._step_since = self._clock()
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def stage(self, name: str) -> None:
        """What happens now: generate, reward, update, evaluate ..."""
        self.view.stage = name
        self._stage_since = self._clock()

    def show(self, metrics: Mapping[str, float], findings: Sequence[Finding]) -> None:
        """The metrics of a step, and the findings that hold at it."""
        trained = self._remember(metrics)
        if trained:
            self._time_step(metrics)
        news = [finding for finding in findings if not self._held_before(finding)]
        self._note(findings)
        if self._live:
            self._live.refresh()
            return
        seconds, waiting = self._durations[-1] if trained else None, bottleneck(self.view.recent)
        self._print(_line(self.face.words, metrics, self.view.steps, seconds, waiting))
        for finding in news:
            self._print(f"{finding.severity} {finding.rule} {finding.name}: {finding.message} Fix: {finding.fix}")

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """The rows of a run that is resumed are part of the picture."""
        for row in rows:
            self._remember(row)

    def message(self, text: str) -> None:
        """A line of its own, above the live screen."""
        self._print(text)

    def svg(self, width: int = 100, height: int = 32) -> str:
        """The screen as it is now, as an SVG picture that loads nothing from elsewhere."""
        paper = Console(
            record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="truecolor"
        )
        paper.print(self._render(paper))
        return re.sub(r"@font-face \{.*?\}\s*", "", paper.export_svg(title=self.face.title), flags=re.DOTALL)

    def _make_live(self) -> Live:
        return Live(
            get_renderable=lambda: self._render(self.console),
            console=self.console,
            refresh_per_second=4,
            vertical_overflow="crop",
        )

    def _render(self, console: Console) -> RenderableType:
        self.view.stage_seconds = self._clock() - self._stage_since
        return self.face.draw(self.view, console)

    def _remember(self, metrics: Mapping[str, float]) -> bool:
        """Whether the row is of a trained step, rather than of an evaluation alone."""
        self.view.step = int(metrics["step"])
        if self.face.held_out in metrics:
            self.view.held_out.append(metrics[self.face.held_out])
        if self.face.curve not in metrics:
            return False
        self.view.metrics = metrics
        self.view.recent.append(metrics)
        self.view.curve.append(metrics[self.face.curve])
        return True

    def _time_step(self, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        self._durations.append(metrics.get("time/step_s", now - self._step_since))
        self._step_since = now
        self.view.step_seconds = fmean(self._durations)

    def _held_before(self, finding: Finding) -> bool:
        return any(held and known.rule == finding.rule for known, held in self.view.findings)

    def _note(self, findings: Sequence[Finding]) -> None:
        step = self.view.step
        self._seen.update({finding.rule: (finding, step) for finding in findings})
        self._seen = {rule: item for rule, item in self._seen.items() if item[1] > step - REMEMBERED_STEPS}
        self.view.findings = [(finding, last == step) for _, (finding, last) in sorted(self._seen.items())]

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)


def _is_plain(console: Console) -> bool:
    return not console.is_terminal or console.is_dumb_terminal


def _training_face(config: AnyConfig) -> Face:
    assert isinstance(config, Config), "another kind of run brings its own face"
    groups, size = config.rollout.groups_per_step, config.rollout.group_size
    heading = f"{Path(config.model.name).name} · {config.objective.loss} · {groups} groups of {size}"
    return Face("leadline train", heading, "reward/mean", "eval/reward_mean", TRAINING_WORDS, screen)


TRAINING_WORDS = {
    "reward {}": "reward/mean",
    "±{}": "reward/std",
    "reached {}": "ledger/reached_share",
    "ratio {}": "importance/ratio_mean",
    "kl {}": "kl/k3",
    "entropy {}": "policy/entropy",
    "len {}": "rollout/length_mean",
    "grad {}": "optimizer/grad_norm",
    "held-out {}": "eval/reward_mean",
}


def _line(
    shown: Mapping[str, str],
    metrics: Mapping[str, float],
    steps: int,
    seconds: float | None,
    waiting: Bottleneck | None,
) -> str:
    """`step 12/100  reward 0.412 ±0.31  reached 97 %  ...`; what was not measured is left out."""
    parts = [f"step {int(metrics['step'])}/{steps}"]
    for words, name in shown.items():
        if name in metrics:
            parts.append(words.format((share if name.endswith("_share") else number)(metrics[name])))
    if seconds is not None:
        parts.append(duration(seconds))
    if seconds is not None and waiting:
        parts.append(str(waiting))
    return "  ".join(parts).replace("  ±", " ±")
