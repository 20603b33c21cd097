"""Samples -> one padded batch in exchangeable steps, and the layouts that are right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from leadline.probes.code.search import Variant

PAD, EOS = 0, 9
Row = list[Any]


@dataclass(frozen=True, slots=True)
class CollateCase:
    """Samples of a batch: (prompt ids, completion ids), and the id of padding, which may be the EOS."""

    samples: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    pad: int = PAD


CASES = (
    CollateCase((((5, 6, 7), (1, 2, EOS)), ((5,), (3, EOS)), ((8, 4), (2, 2, 3, 1, EOS)), ((6, 6, 6, 6), (EOS,)))),
    CollateCase((((5, 6), (1, 2, 3, 4)), ((7, 7, 7), (2, EOS)))),
    CollateCase((((4,), (1, EOS)), ((4, 5, 6), (3, 2, 1, EOS)), ((3, 3), (2, 2))), pad=EOS),
)


@dataclass(frozen=True, slots=True)
class CollateSteps:
    """Each output of a collator, row by row, from the rows of prompts and completions that `pad` made.

    A row is a list of cells (kind, id), kind being p(rompt), c(ompletion) or -(padding).
    """

    pad: Callable[[CollateCase, int, int], list[Row]]
    """(case, longest prompt, longest completion) -> rows of cells."""
    attention: Callable[[Row, int], Row]
    """(row, id of padding) -> 0 and 1."""
    loss_mask: Callable[[Row, int], Row]
    positions: Callable[[Row], Row]
    order: Callable[[Sequence[Any]], Sequence[Any]]
    """Of the values by completion: advantages, rewards."""
    missing: float
    """What stands for a logprob that is missing."""

    def __call__(self, case: CollateCase) -> dict[str, Any]:
        rows = self.pad(case, max(len(p) for p, _ in case.samples), max(len(c) for _, c in case.samples))
        ids = [[case.pad if kind == "-" else token for kind, token in row] for row in rows]
        mask = [self.loss_mask(row, case.pad) for row in rows]
        attention = [self.attention(row, case.pad) for row in rows]
        labels = [[t if m else -100 for t, m in zip(i, r, strict=True)] for i, r in zip(ids, mask, strict=True)]
        logprobs = [self._logprobs(row, m) for row, m in zip(rows, mask, strict=True)]
        split = _split(rows)
        return {
            "input_ids": ids,
            "attention_mask": attention,
            "loss_mask": mask,
            "labels": labels,
            "position_ids": [self.positions(row) for row in rows],
            "prompt_ids": [row[:split] for row in ids],
            "prompt_mask": [row[:split] for row in attention],
            "completion_ids": [row[split:] for row in ids],
            "completion_mask": [row[split:] for row in mask],
            "advantages": list(self.order(advantages_of(case))),
            "old_logprobs": logprobs,
            "completion_logprobs": [row[split:] for row in logprobs],
        }

    def _logprobs(self, row: Row, mask: Row) -> Row:
        """At the trained tokens; the value at the others is the collator's own affair (None)."""
        scores = iter(logprobs_of(sum(kind == "c" for kind, _ in row)))
        values = [next(scores) if kind == "c" else None for kind, _ in row]
        return [self.missing if value != value else value if m else None for value, m in zip(values, mask, strict=True)]


def advantages_of(case: CollateCase) -> list[float]:
    """All different."""
    return [0.5 * i - 0.7 for i in range(len(case.samples))]


def logprobs_of(length: int) -> list[float]:
    """Of a completion's tokens; the third is missing."""
    return [float("nan") if i == 2 else -0.1 - 0.25 * i for i in range(length)]


def padded(prompt_left: bool, completion_left: bool, apart: bool) -> Callable[[CollateCase, int, int], list[Row]]:
    """Rows of cells. `apart`: prompts and completions padded each to their own width, else as one sequence."""

    def pad(case: CollateCase, prompt_width: int, completion_width: int) -> list[Row]:
        rows = []
        for prompt, completion in case.samples:
            p, c = [("p", t) for t in prompt], [("c", t) for t in completion]
            if apart:
                rows.append(_side(p, prompt_width, prompt_left) + _side(c, completion_width, completion_left))
            else:
                width = max(len(a) + len(b) for a, b in case.samples)
                rows.append(_side(p + c, width, prompt_left))
        return rows

    return pad


def variants(keys: Sequence[str]) -> list[Variant]:
    """The layouts that a model reads rightly: no padding between a prompt and its completion."""
    sides = {
        "prompts padded left, completions right": padded(True, False, True),
        "sequences padded right": padded(False, False, False),
        "sequences padded left": padded(True, True, False),
    }
    positions = {"": _cumulative, "positions from the left edge": _arange}
    return [
        Variant(
            words, detail, CollateSteps(pad, _not_padding, _completion, place, list, float("nan")), int(bool(detail))
        )
        for (words, pad), (detail, place) in product(sides.items(), positions.items())
        if not detail or ("position_ids" in keys and "right" in words and "left" not in words)
    ]


def outcome(output: Any, names: Callable[[Sequence[str]], Mapping[str, str]]) -> dict[str, Any]:
    """What a collator returned, by the reference's keys, as plain lists; keys that mean nothing known are left out."""
    items = dict(output if isinstance(output, Mapping) else vars(output))
    ours = names(list(items))
    return {ours[key]: _plain(value) for key, value in items.items() if key in ours}


def same_batch(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Every output of `one` is as in `other`; where `other` is None, anything may stand."""
    return all(_same(value, other[key]) for key, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, list):
        return isinstance(one, list) and len(one) == len(other) and all(map(_same, one, other))
    if other is None:
        return True
    return (one != one and other != other) or (not isinstance(one, list) and abs(one - other) < 1e-6)


def _side(cells: Row, width: int, left: bool) -> Row:
    padding = [("-", 0)] * (width - len(cells))
    return padding + cells if left else cells + padding


def _split(rows: Sequence[Row]) -> int:
    """Where completions begin, if they begin at one place."""
    starts = [next((i for i, (kind, _) in enumerate(row) if kind == "c"), 0) for row in rows]
    return max(starts)


def _not_padding(row: Row, pad: int) -> Row:
    return [int(kind != "-") for kind, _ in row]


def _completion(row: Row, pad: int) -> Row:
    return [int(kind == "c") for kind, _ in row]


def _cumulative(row: Row) -> Row:
    """0 at the first real token; what stands at padding is no matter."""
    places, seen = [], 0
    for kind, _ in row:
        places.append(None if kind == "-" else seen)
        seen += kind != "-"
    return places


def _arange(row: Row) -> Row:
    return list(range(len(row)))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, bool) else value
