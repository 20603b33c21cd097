"""Dataset rows of the materials task, for `data.source` and `data.eval_source`.

A prompt names a compound, its band gap and the window that the gap of the changed crystal must fall into:

    Material: GaAs
    Band gap: 1.55 eV
    Target: 1.80 to 2.00 eV
    Change: +0.25 to +0.45 eV

The last line is the difference of the two above it: a small model does not subtract. Every window is around the gap of
some valid proposal for its compound, so every prompt has an answer, and excludes the gap of the compound itself.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from leadline.materials.compounds import COMPOUNDS, ELEMENTS
from leadline.materials.judge import TAGS, gap_after, gap_of
from leadline.materials.modification import MOST_STRAIN, Modification, Refusal, Strain, Substitute, Swap

HELD_OUT = ("AlAs", "GaSb", "InP")
"""Compounds that no training prompt and no demonstration starts from; each element occurs in others."""

TRAINED = tuple(name for name in COMPOUNDS if name not in HELD_OUT)

HALF_WIDTH = 0.1
"""Of a target window, in eV."""

MOST_OFF = 0.08
"""Of the gap that a window is drawn around from its middle, in eV: rounding adds 0.01, and the gap stays inside."""

ANSWERS = 0.5
"""The share of demonstrations that hit the window on purpose: a teacher who is often, but not always, right."""

SLIGHT, STRONG = 0.3, 1.0
"""Changes that a demonstrated hypothesis calls slight are smaller, strong ones larger; in eV. It names no number: the
digits of the prompt are less likely in a completion that is drawn with a repetition penalty."""

Row = dict[str, Any]


def prompts(size: int, seed: int) -> list[Row]:
    """`size` training prompts; the middles of their windows are even numbers of 0.01 eV."""
    return [row for row, _ in _tasks(TRAINED, 0.0, size, seed)]


def held_out_prompts(size: int, seed: int) -> list[Row]:
    """`size` prompts of other compounds than `prompts`, with other windows: odd numbers of 0.01 eV."""
    return [row for row, _ in _tasks(HELD_OUT, 0.01, size, seed)]


def demonstrations(size: int, seed: int) -> list[Row]:
    """The rows of `prompts`, each with a random valid proposal for its compound in `completion`.

    It is right in form and in what it says of the gap. Every second one, by chance, is the proposal that the window was drawn
    around; the others hit the window by chance only.
    """
    return _demonstrated(_tasks(TRAINED, 0.0, size, seed), seed)


def held_out_demonstrations(size: int, seed: int) -> list[Row]:
    """The rows of `held_out_prompts`, demonstrated in the same way."""
    return _demonstrated(_tasks(HELD_OUT, 0.01, size, seed), seed)


def proposal(material: str, modification: Modification) -> str:
    """A completion that proposes `modification`, with the hypothesis that it bears out."""
    change = gap_after(material, modification) - gap_of(material)
    size = "slightly" if abs(change) < SLIGHT else "strongly" if abs(change) > STRONG else "clearly"
    hypothesis = f"{'raises' if change > 0 else 'lowers'} the gap {size}"
    return f"{TAGS[0]}{hypothesis}{TAGS[1]}{TAGS[2]}{modification}{TAGS[3]}"


def _demonstrated(tasks: Sequence[tuple[Row, Modification]], seed: int) -> list[Row]:
    rng = np.random.default_rng([seed % 2**64, 1])
    shown = (answer if rng.random() < ANSWERS else _drawn(row["material"], rng) for row, answer in tasks)
    return [{**row, "completion": proposal(row["material"], x)} for (row, _), x in zip(tasks, shown, strict=True)]


def _tasks(starts: Sequence[str], offset: float, size: int, seed: int) -> list[tuple[Row, Modification]]:
    """Prompts, each with an answer; the middles of their windows are multiples of 0.02 eV plus `offset`."""
    return list(islice(_endless_tasks(starts, offset, seed), size))


def _endless_tasks(starts: Sequence[str], offset: float, seed: int) -> Iterator[tuple[Row, Modification]]:
    rng = np.random.default_rng([seed % 2**64, 0])
    while True:
        material = starts[int(rng.integers(len(starts)))]
        answer = _drawn(material, rng)
        near = gap_after(material, answer) + rng.uniform(-MOST_OFF, MOST_OFF)
        middle = round((near - offset) / 0.02) * 0.02 + offset
        low, high = round(middle - HALF_WIDTH, 2), round(middle + HALF_WIDTH, 2)
        if low > 0 and not low <= gap_of(material) <= high:
            yield _row(material, low, high), answer


def _row(material: str, low: float, high: float) -> Row:
    gap = round(gap_of(material), 2)
    prompt = (
        f"Material: {material}\nBand gap: {gap:.2f} eV\n"
        f"Target: {low:.2f} to {high:.2f} eV\nChange: {low - gap:+.2f} to {high - gap:+.2f} eV\n"
    )
    return {"prompt": prompt, "material": material, "lowest": low, "highest": high}


def _drawn(material: str, rng: np.random.Generator) -> Modification:
    """A valid modification: first the kind is drawn, then one of its kind."""
    kinds = _valid(material)
    kind = kinds[rng.integers(len(kinds))]
    return kind[rng.integers(len(kind))]


@lru_cache
def _valid(material: str) -> list[list[Modification]]:
    """The modifications in steps of 0.05 and 0.5 % that the physics allows, by kind; no kind is empty."""
    kinds = (_substitutions(material), _swaps(material), _strains())
    valid = ([change for change in kind if _has_gap(material, change)] for kind in kinds)
    return [kind for kind in valid if kind]


def _has_gap(material: str, modification: Modification) -> bool:
    try:
        gap_after(material, modification)
    except Refusal:
        return False
    return True


def _substitutions(material: str) -> Iterator[Modification]:
    compound = COMPOUNDS[material]
    for old in sorted({compound.cation, compound.anion}):
        for new in sorted(ELEMENTS - {old}):
            yield from (Substitute(old, new, step / 20) for step in range(1, 20))


def _swaps(material: str) -> Iterator[Modification]:
    return (Swap(material, name) for name in COMPOUNDS if name != material)


def _strains() -> Iterator[Modification]:
    most = round(2 * MOST_STRAIN)
    return (Strain(step / 2) for step in range(-most, most + 1) if step)
