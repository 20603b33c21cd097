"""What a reward function returned, as numbers: one per completion, or an error that says what came back instead."""

import math
from numbers import Real
from typing import Any

from leadline.errors import RewardError


def single_value(label: str, returned: Any) -> float | None:
    """The reward of one completion: a number, or an array, tensor or list of one. None = no reward.

    Raises RewardError for anything else. NaN and infinities pass: they are a bad rollout, not a bad function.
    """
    plain = _plain(returned)
    if isinstance(plain, list | tuple) and len(plain) == 1:
        plain = _plain(plain[0])
    if not _is_value(plain):
        raise RewardError(
            f"The reward {label!r} returned {_described(returned)}, but it scores one completion. Nothing could be "
            "learned from it. Return one number, or None for no reward (a function of lists names its parameters "
            "prompts and completions, or sets batched = true)."
        )
    return _number(plain)


def batch_values(label: str, returned: Any, count: int) -> list[float | None]:
    """The rewards of `count` completions: a list, tuple, array or tensor of exactly so many numbers or Nones.

    Raises RewardError for anything else.
    """
    plain = _plain(returned)
    values = [_plain(value) for value in plain] if isinstance(plain, list | tuple) else None
    if values is None or len(values) != count or not all(_is_value(value) for value in values):
        raise RewardError(
            f"The reward {label!r} returned {_described(returned)}, but it scores {count} completions at once. Rewards "
            "would belong to other completions. Return one number per completion, in their order, or None for no "
            "reward."
        )
    return [_number(value) for value in values]


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as Python lists and numbers, without importing their libraries."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, Real)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:  # an int or Fraction beyond the floats
        return math.inf if value > 0 else -math.inf


def _described(value: Any) -> str:
    kind = type(value).__name__
    if hasattr(value, "shape"):
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        odd = next((type(_plain(v)).__name__ for v in value if not _is_value(_plain(v))), None)
        return f"{kind} of {len(value)}" + (f" holding a {odd}" if odd else " numbers")
    return f"{kind} {value!r:.40}" if isinstance(value, str) else kind
