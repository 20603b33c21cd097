"""Reward components of the materials task. Each takes the completions of one prompt and its columns, a value for each.

In a recipe: `name = "leadline.materials.rewards:inside"`.
"""

import math
from collections.abc import Sequence

from leadline.materials.judge import Verdict, gap_of, judge


def parses(completions: Sequence[str], material: Sequence[str]) -> list[float]:
    """1 if the completion is a hypothesis and a modification in their tags and in the grammar, else 0."""
    return [float(verdict.parsed) for verdict in _verdicts(completions, material)]


def physical(completions: Sequence[str], material: Sequence[str]) -> list[float]:
    """1 if the modification can be made and leaves a semiconductor, else 0."""
    return [float(verdict.physical) for verdict in _verdicts(completions, material)]


def hypothesis(completions: Sequence[str], material: Sequence[str]) -> list[float]:
    """1 if the hypothesis says rightly whether the modification raises or lowers the gap, else 0."""
    return [
        float(verdict.claim is not None and verdict.change is not None and verdict.claim * verdict.change > 0)
        for verdict in _verdicts(completions, material)
    ]


def inside(
    completions: Sequence[str], material: Sequence[str], lowest: Sequence[float], highest: Sequence[float]
) -> list[float]:
    """1 if the new gap lies in the window, else 0."""
    return [float(distance == 0) for distance in _distances(completions, material, lowest, highest)]


def closeness(
    completions: Sequence[str], material: Sequence[str], lowest: Sequence[float], highest: Sequence[float]
) -> list[float]:
    """How much of the way from the starting gap to the window is made: 1 in it, 0 as far off as before, or without a gap."""
    before = [_distance(gap_of(name), low, high) for name, low, high in zip(material, lowest, highest, strict=True)]
    after = _distances(completions, material, lowest, highest)
    return [_made(now, then) for now, then in zip(after, before, strict=True)]


def _verdicts(completions: Sequence[str], material: Sequence[str]) -> list[Verdict]:
    return [judge(name, completion) for name, completion in zip(material, completions, strict=True)]


def _distances(
    completions: Sequence[str], material: Sequence[str], lowest: Sequence[float], highest: Sequence[float]
) -> list[float]:
    verdicts = _verdicts(completions, material)
    return [_distance(v.gap, low, high) for v, low, high in zip(verdicts, lowest, highest, strict=True)]


def _made(now: float, then: float) -> float:
    if now == 0:
        return 1.0
    return max(0.0, 1 - now / then) if then > 0 else 0.0


def _distance(gap: float | None, low: float, high: float) -> float:
    """From a gap to the window, in eV; infinite without a gap."""
    return math.inf if gap is None else max(low - gap, gap - high, 0.0)
