"""Axes: from values to places on paper, with round ticks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOG_SPAN = 1000.0
"""Positive values that span more than this are drawn on a log axis: on a linear one the small ones would be a line."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A value's place: `scale(value)` is 0 at `low` and 1 at `high`, clamped. A log scale has a positive `low`.

    Example: Scale(1.0, 100.0, log=True)(10.0) == 0.5
    """

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(max(x, self.low)) if self.log else x for x in (self.low, self.high, value))
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, wanted: int = 4) -> list[float]:
        """Round values within the scale, in ascending order: at most about `wanted`, at least one."""
        return _decades(self, wanted) if self.log else _rounds(self.low, self.high, wanted)


def fit(values: Iterable[float], log: bool | None = None, anchor: float | None = None) -> Scale:
    """A scale with a little room around the finite values; log if asked, or if they are positive and span decades.

    A log scale leaves values <= 0 out. `anchor` is in sight whatever the values: 0 for a share, 1 for a ratio.
    """
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    extra = [] if anchor is None else [anchor]
    if log or (log is None and positive and len(positive) == len(finite) and max(positive) > LOG_SPAN * min(positive)):
        return _log_scale([*positive, *(value for value in extra if value > 0)])
    low, high = min([*finite, *extra], default=0.0), max([*finite, *extra], default=1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 2 or 1.0
        return Scale(low - room, high + room)
    room = min(0.06 * (high - low), 1e300)
    return Scale(low if low == anchor else low - room, high + room)


def _log_scale(positive: Sequence[float]) -> Scale:
    # Subnormal numbers are at the foot of the axis: a decade of them would have no two ends.
    low, high = (max(-306.0, math.log10(x)) for x in (min(positive, default=0.1), max(positive, default=10.0)))
    middle, half = (low + high) / 2, max((high - low) * 0.53, 0.35)
    return Scale(10.0 ** max(-307.0, middle - half), 10.0 ** min(308.0, middle + half), log=True)


def _rounds(low: float, high: float, wanted: int) -> list[float]:
    raw = (high / wanted) - (low / wanted)
    if not math.isfinite(raw) or raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)] or [low]


def _decades(scale: Scale, wanted: int) -> list[float]:
    low, high = math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9)
    if high - low < 1:
        factors = (1, 2, 5)
        found = [
            f * 10.0**e for e in range(low - 1, high + 1) for f in factors if scale.low <= f * 10.0**e <= scale.high
        ]
        return found or [scale.low]
    stride = max(1, math.ceil((high - low + 1) / wanted))
    return [10.0**exponent for exponent in range(low, high + 1) if exponent % stride == 0] or [10.0**low]


def whole_ticks(first: int, last: int, wanted: int = 5) -> list[int]:
    """Round step numbers from first to last."""
    return sorted({round(tick) for tick in _rounds(first, last, wanted) if first <= round(tick) <= last}) or [first]
