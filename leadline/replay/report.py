"""A step replayed: as it was recorded, and under each change. Built here; written by `text.py`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.config import Config
from leadline.errors import ConfigError
from leadline.policy.batch import Batch
from leadline.replay.changes import Change, usual_changes
from leadline.replay.record import Recorded, read_step
from leadline.replay.step import Replayed, Unseen, replay_step
from leadline.replay.weights import (
    Weights,
    find_weights,
    policy_before,
    scored_again,
    trained_again,
    weight_gradient_norm,
)

ROUNDING = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""Relative difference, by the dtype of the weights, up to which an update made again is the recorded one: another number
of threads adds in another order. What follows from recorded logprobs has no such excuse."""
EXACT = 1e-5
FLOOR = 0.1
"""Numbers are compared relative to this at least: log ratios and losses on policy are sums that cancel."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a replay is from the record."""

    compared: int
    differences: Mapping[str, tuple[float, float]]
    """Metric -> recorded and replayed, where they are not the same number."""
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max((_relative(*pair) for pair in self.differences.values()), default=0.0)

    @property
    def worst(self) -> str:
        """The metric that differs most."""
        return max(self.differences, key=lambda name: _relative(*self.differences[name]))

    @property
    def holds(self) -> bool:
        return self.largest <= self.tolerance


@dataclass(frozen=True, slots=True)
class Line:
    """The step under one change."""

    change: Change
    replayed: Replayed | None
    """None = it cannot be replayed, for the reason `error`."""
    weight_norm: float | None = None
    """Norm of the gradient by the weights, of the first optimizer step; None = the weights are gone."""
    error: str = ""

    @property
    def reached(self) -> float:
        """Share of the signal that reached the gradient; NaN if there was no signal."""
        return math.nan if self.replayed is None else self.replayed.metrics["ledger/reached_share"]


@dataclass(slots=True)
class Report:
    """All that a replay has found."""

    record: Recorded
    recorded: Line
    tokens: Agreement
    """Of what follows from the recorded logprobs."""
    weights: Weights | str
    """Where the weights before the step are, or why there are none."""
    update: Agreement | None
    """Of the update made again from those weights; None without them."""
    lines: list[Line] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return self.tokens.holds and (self.update is None or self.update.holds)


def replay(
    run: Path,
    step: int | None,
    change: Change | None,
    *,
    with_weights: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """The step (None = the last that is kept) as recorded and under `change`, or under the usual changes.

    Raises RunDirError, ConfigError, ModelError.
    """
    record = read_step(run, step)
    if change is not None:
        change.config(record.config)  # what was asked for must be possible; of the usual changes some may not be
    batch = record.batch(record.config)
    progress("the step as recorded")
    again = replay_step(batch, record.config, record.seen, as_recorded=True)
    weights = find_weights(record) if with_weights else "not looked for"
    update = None
    if isinstance(weights, Weights):
        progress("the update made again")
        redone = trained_again(record, weights)
        update = compare(record.row, redone, ROUNDING[record.config.model.dtype], optimizer=True)
    report = Report(record, Line(Change({}), again), compare(record.row, again.metrics, EXACT), weights, update)
    policies = _Policies(record, weights)
    report.recorded = _with_weight_norm(report.recorded, policies, batch, record.config)
    for one in usual_changes(record.config) if change is None else [change]:
        progress(str(one))
        report.lines.append(_line(record, one, policies))
    return report


def compare(
    recorded: Mapping[str, float], replayed: Mapping[str, float], tolerance: float, *, optimizer: bool = False
) -> Agreement:
    """Of all that both measure but what the clock and the machine decide; the optimizer's part only if it was redone."""
    unlike = ("time/", "throughput/", "memory/", *(() if optimizer else ("optimizer/",)))
    names = [name for name in recorded if name in replayed and not name.startswith(unlike)]
    pairs = {name: (float(recorded[name]), float(replayed[name])) for name in names}
    return Agreement(len(names), {name: pair for name, pair in pairs.items() if not _equal(*pair)}, tolerance)


def restoring(report: Report) -> Line | None:
    """The change that brings most of a signal that was lost; None if at least half reached the gradient as it was.

    Among changes that bring about the same, a correction that is still one is preferred, in the order of the report.
    """
    before = report.recorded.reached
    candidates = [line for line in report.lines if line.reached >= max(0.5, before + 0.2)]
    if before >= 0.5 or not candidates:
        return None
    corrected = [line for line in candidates if line.change.settings.get("objective.importance_action") != "off"]
    most = max(min(line.reached, 1.0) for line in corrected or candidates)
    return next(line for line in corrected or candidates if line.reached >= most - 0.05)


def as_recorded(line: Line, report: Report) -> bool:
    """Whether the change moved the pull at the tokens by less than a thousandth."""
    if line.replayed is None or report.recorded.replayed is None:
        return False
    one, other = line.replayed.pulls, report.recorded.replayed.pulls
    return one.keys() == other.keys() and all(_same_pull(one[k].logprobs, other[k].logprobs) for k in one)


def _same_pull(one: Tensor, other: Tensor) -> bool:
    apart = (one - other).nan_to_num().norm()
    return torch.equal(one.isnan(), other.isnan()) and bool(apart <= 1e-3 * other.nan_to_num().norm())


class _Policies:
    """The policy before the step, made once for each way in which a change makes it compute."""

    def __init__(self, record: Recorded, weights: Weights | str) -> None:
        self._record, self._weights = record, weights
        self._made: dict[str, Any] = {}

    def under(self, config: Config) -> Any:
        """None if the weights are gone."""
        if isinstance(self._weights, str):
            return None
        objective = config.objective
        key = f"{config.model!r} {config.sampling!r} {objective.beta > 0} {objective.entropy_bonus != 0}"
        if key not in self._made:
            self._made = {key: policy_before(self._record, self._weights, config)}  # one at a time: they are large
        return self._made[key]

    @property
    def reason(self) -> str:
        return str(self._weights)


def _line(record: Recorded, change: Change, policies: _Policies) -> Line:
    try:
        config = change.config(record.config)
    except ConfigError as error:
        return Line(change, None, error=str(error))
    batch = record.batch(config)
    try:
        if not change.rescores:
            return _with_weight_norm(Line(change, replay_step(batch, config, record.seen)), policies, batch, config)
    except Unseen as unseen:
        if policies.under(config) is None:
            return Line(change, None, error=f"{unseen}, and {policies.reason}")
    if (policy := policies.under(config)) is None:
        return Line(change, None, error=f"it asks the policy again, and {policies.reason}")
    if config.optimizer.optimizer_steps > 1:
        return Line(
            change, None, error="it asks the policy again, which moved between the optimizer steps of this step"
        )
    replayed = replay_step(batch, config, scored_again(policy, batch, config))
    return _with_weight_norm(Line(change, replayed), policies, batch, config)


def _with_weight_norm(line: Line, policies: _Policies, batch: Batch, config: Config) -> Line:
    """The line with the norm of the first optimizer step's gradient by the weights, if they are there."""
    policy = policies.under(config)
    if policy is None or line.replayed is None:
        return line
    first = line.replayed.pulls.get(0)
    norm = 0.0 if first is None else weight_gradient_norm(policy, batch, config, first)
    return Line(line.change, line.replayed, norm, line.error)


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float, other: float) -> float:
    if math.isnan(one) != math.isnan(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), FLOOR)
