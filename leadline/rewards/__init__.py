"""The built-in rewards by name.

To add one: write `rewards/NAME.py` with a plain function `NAME(prompt, completion, **columns)` that returns a number,
or None for "no reward"; give it only the parameters it uses; put it into `REWARDS`; pin it in `tests/rewards/`.
A parameter is filled from, in this order: `params` of the recipe; `prompt` and `completion` (text),
`completion_ids`, `finish_reason`; the dataset column of that name; its default.
"""

from collections.abc import Callable
from typing import Any

from leadline.rewards.exact_match import exact_match
from leadline.rewards.format_tags import format_tags
from leadline.rewards.length import length
from leadline.rewards.math_answer import math_answer
from leadline.rewards.reasoning_gym import reasoning_gym

REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "format_tags": format_tags,
    "length": length,
    "math_answer": math_answer,
    "reasoning_gym": reasoning_gym,
}
