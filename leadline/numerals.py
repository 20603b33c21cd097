"""How the screen writes numbers: short, and honest about what is undefined or was not measured."""

import math


def number(value: float | None) -> str:
    """Three or four digits; `n/a` for NaN, which was measured and is undefined; a dash for what was not measured."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "n/a"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
    return f"{value:.1e}"


def share(value: float | None) -> str:
    """A share in percent, with one decimal below 10 %."""
    if value is None or math.isnan(value):
        return number(value)
    return f"{value:.1%}".replace("%", " %") if abs(value) < 0.0995 else f"{value:.0%}".replace("%", " %")


def duration(seconds: float | None) -> str:
    """`40ms`, `3.1s`, `2m 58s` or `1h 05m`."""
    if seconds is None or math.isnan(seconds):
        return number(seconds)
    if seconds < 0.95:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
