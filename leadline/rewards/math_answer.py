"""Is the completion mathematically equal to the answer?"""

import logging
from typing import Any

from leadline.rewards.isolated import Isolated


def math_answer(completion: str, answer: Any) -> float | None:
    """1.0 if the last expression of the completion equals the column `answer` (math-verify), else 0.0.

    The answer may be bare (`1/2`, `\\frac{1}{2}`), in dollars or `\\boxed`, or follow `####` as in GSM8K. None for a
    row without an answer. Raises (and so fails the rollout): the answer holds no mathematics; the comparison takes
    too long, as that of 9^9^9 does.
    """
    return None if answer is None else float(_equal_in_child(str(answer), completion))


def equal(answer: str, completion: str) -> bool:
    """Whether math-verify finds the completion equal to the answer. Never returns for some inputs: see `Isolated`."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off
    gold = parse(_as_latex(answer), parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {answer!r} holds no mathematics")
    return bool(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def _as_latex(answer: str) -> str:
    """math-verify reads LaTeX only between delimiters; without them `\\frac{1}{2}` may be read as `1`."""
    text = answer.rpartition("####")[2].strip()
    return text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text}$"


_equal_in_child = Isolated("leadline.rewards.math_answer:equal", imports=["math_verify"])
