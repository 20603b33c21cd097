"""Is the completion as long as it should be?"""

from collections.abc import Sequence


def length(completion_ids: Sequence[int], target: float, *, slack: float | None = None) -> float:
    """max(0, 1 - |n - target| / slack) for a completion of n tokens.

    1 at `target` tokens (from `params`, or a dataset column), falling linearly to 0 at a distance of `slack` tokens
    (default: `target`). Tokens are counted as sampled, reasoning and terminator included.
    """
    width = target if slack is None else slack
    if width <= 0:
        raise ValueError(f"slack is {width}, but it is a distance in tokens above 0")
    return max(0.0, 1.0 - abs(len(completion_ids) - target) / width)
