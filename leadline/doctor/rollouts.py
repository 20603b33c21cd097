"""What dumped rollouts show and no metric does: copies within a group, tags, padding, one repeated character."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from leadline.doctor.evidence import Evidence, Strength, percent
from leadline.doctor.view import View

Sample = Mapping[str, Any]
LEAST = 8
"""Rollouts below which nothing is said about a share of them."""
SOURCE = "rollouts"


def text(sample: Sample) -> str:
    """The completion of a rollout, under whichever name it was dumped."""
    return str(sample.get("completion") or sample.get("output") or "")


def share(
    run: View, matches: Callable[[str], bool], limit: float, note: str, strength: Strength = "strong"
) -> list[Evidence]:
    """One item if more than this share of the dumped completions match. {percent} and {count} may be used in the note."""
    texts = [text(sample) for sample in run.run.samples if text(sample)]
    if len(texts) < LEAST:
        return []
    part = sum(map(matches, texts)) / len(texts)
    said = note.format(percent=percent(part), count=len(texts))
    return [Evidence(SOURCE, 0, part, limit, said, strength)] if part > limit else []


def groups(run: View) -> list[Sequence[Sample]]:
    """Dumped rollouts of the same step and prompt, the last group left out: the dump may have been cut in it."""
    found: dict[tuple[Any, str], list[Sample]] = defaultdict(list)
    for sample in run.run.samples:
        prompt = sample.get("prompt") or sample.get("input")
        if prompt is not None:
            found[sample.get("step"), str(prompt)].append(sample)
    whole = list(found.values())
    return [group for group in (whole[:-1] if len(whole) > 1 else whole) if len(group) > 1]


def column(group: Sequence[Sample], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A number of each rollout of a group; NaN where it has none."""
    return np.array([float(s[name]) if isinstance(s.get(name), int | float) else np.nan for s in group])


def one_character(completion: str) -> bool:
    """Nearly all of the text is one character, as in `!!!!!!!!`."""
    bare = re.sub(r"\s", "", completion)
    return len(bare) >= 8 and max(bare.count(c) for c in set(bare)) > 0.8 * len(bare)
