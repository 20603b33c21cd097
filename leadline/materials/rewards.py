"""Reward components of the materials task. Each takes the completions of one prompt and its columns, a value for each.

In a recipe: `name = "leadline.materials.rewards:inside"`.
"""

import math
from collections.abc import Sequence

from leadline.materials.judge import Verdict, judge


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
    completions: Sequence[str],
    material: Sequence[str],
    lowest: Sequence[float],
    highest: Sequence[float],
    *,
    scale: float = 0.3,
) -> list[float]:
    """exp(-distance / scale), both in eV: 1 in the window, 0 for a proposal without a gap."""
    return [math.exp(-distance / scale) for distance in _distances(completions, material, lowest, highest)]


def _verdicts(completions: Sequence[str], material: Sequence[str]) -> list[Verdict]:
    return [judge(name, completion) for name, completion in zip(material, completions, strict=True)]


def _distances(
    completions: Sequence[str], material: Sequence[str], lowest: Sequence[float], highest: Sequence[float]
) -> list[float]:
    """From the new gap to the window, in eV; infinite without a gap."""
    verdicts = _verdicts(completions, material)
    return [
        math.inf if verdict.gap is None else max(low - verdict.gap, verdict.gap - high, 0.0)
        for verdict, low, high in zip(verdicts, lowest, highest, strict=True)
    ]
