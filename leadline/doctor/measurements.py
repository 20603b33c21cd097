"""Numbers that no trainer logs by itself: of a probe, an ablation, a dump, or a person's note.

They come under free names, so they are recognised by words. Each function returns evidence for what it found.
"""

import re

from leadline.doctor.evidence import Evidence, Strength, number
from leadline.doctor.view import View

BEFORE = r"\b(before|start|initial|pre|step0|step 0|begin|old|base)\b"
AFTER = r"\b(after|later|end|final|post|new|late)\b"


def zero(run: View, pattern: str, note: str, strength: Strength = "strong") -> list[Evidence]:
    """A measurement is 0 somewhere. {name} may be used in the note."""
    return [
        Evidence(name, series.step, 0.0, 0.0, note.format(name=name), strength)
        for name, series in run.measured(pattern)
        if len(series.finite) and series.low == 0
    ]


def above(run: View, pattern: str, limit: float, note: str, strength: Strength = "strong") -> list[Evidence]:
    """A measurement exceeds the limit somewhere. {name} and {value} may be used in the note."""
    found = []
    for name, series in run.measured(pattern):
        over = series.finite.where(series.finite.values > limit)
        if len(over):
            text = note.format(name=name, value=number(over.high))
            found.append(Evidence(name, over.step, over.last, limit, text, strength))
    return found


def changes(run: View, pattern: str) -> list[tuple[str, int, float, float]]:
    """(name, step, from, to) of each measurement over the rows, or over a pair of keys such as before and after."""
    words = {name: re.sub(r"[_/.\-]+", " ", name.lower()) for name, _ in run.measured(pattern)}
    found = [
        (name, run[name].step, run[name].first, run[name].last)
        for name, text in words.items()
        if len(run[name].finite) > 1 and not re.search(f"{BEFORE}|{AFTER}", text)
    ]
    for name, text in words.items():
        if not re.search(BEFORE, text):
            continue
        stem = set(re.sub(BEFORE, "", text).split())
        for other, candidate in words.items():
            rest = set(re.sub(AFTER, "", candidate).split())
            if re.search(AFTER, candidate) and rest and (rest <= stem or stem <= rest):
                found.append((other, run[other].step, run[name].first, run[other].last))
    return found


def falls(run: View, pattern: str, share: float, strength: Strength = "strong") -> list[Evidence]:
    """A measurement loses at least this share of itself."""
    return [
        Evidence(name, step, end, start, f"{name} fell from {number(start)} to {number(end)}.", strength)
        for name, step, start, end in changes(run, pattern)
        if start > 0 and end <= (1 - share) * start
    ]


def grows(run: View, pattern: str, factor: float, strength: Strength = "strong") -> list[Evidence]:
    """A measurement grows by at least this factor (from 0: to at least 1)."""
    return [
        Evidence(name, step, end, start, f"{name} rose from {number(start)} to {number(end)}.", strength)
        for name, step, start, end in changes(run, pattern)
        if (start > 0 and end >= factor * start) or (start == 0 and end >= 1)
    ]
