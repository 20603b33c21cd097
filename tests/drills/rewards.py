"""Rewards of the drills: some that a random model over bytes can learn from, and some that are wrong."""

import math
from collections.abc import Sequence


def even_share(completion_ids: Sequence[int]) -> float:
    """The share of even token ids: about a half at first, and learnable."""
    return sum(i % 2 == 0 for i in completion_ids) / max(1, len(completion_ids))


def mostly_even(completion_ids: Sequence[int]) -> float:
    """1.0 for more even ids than odd ones: a reward of 0 and 1, true of about every second completion."""
    return float(even_share(completion_ids) > 0.55)


def rarely(completion_ids: Sequence[int]) -> float:
    """1.0 for about one completion in seven, which is sparse and enough for groups of six."""
    return float(len(completion_ids) > 2 and even_share(completion_ids) > 0.7)


def shortness(completion_ids: Sequence[int]) -> float:
    """Shorter is better."""
    return max(0.0, 1.0 - len(completion_ids) / 40)


def by_answer(completion_ids: Sequence[int], answer: str) -> float:
    """The share of even ids, or of odd ones, as the prompt's answer asks."""
    share = even_share(completion_ids)
    return share if answer == "even" else 1 - share


def penalty(completion_ids: Sequence[int]) -> float:
    """Never above 0: minus the distance to a length of 12."""
    return -abs(len(completion_ids) - 12) / 40


def hundredfold(completion_ids: Sequence[int]) -> float:
    return 100 * even_share(completion_ids)


def now_and_then(completion_ids: Sequence[int]) -> float | None:
    """Has nothing to say about every fourth completion."""
    return None if sum(completion_ids) % 4 == 0 else even_share(completion_ids)


# ---- wrong ones


def constant(completion: str) -> float:
    return 1.0


def silent(completion: str) -> None:
    return None


def raising(completion_ids: Sequence[int]) -> float:
    """The judge chokes on a third of what it gets."""
    if sum(completion_ids) % 3 == 0:
        raise ValueError("cannot judge this")
    return even_share(completion_ids)


def sometimes_nan(completion_ids: Sequence[int]) -> float:
    return math.nan if sum(completion_ids) % 7 == 0 else even_share(completion_ids)


def distance(completion_ids: Sequence[int]) -> float:
    """The distance to a length of 5: what should shrink is rewarded for growing."""
    return abs(len(completion_ids) - 5) / 40


def answered(completion: str) -> float:
    """Looks for a marker that no prompt ever asked for."""
    return float("####" in completion)


def finished(completion_ids: Sequence[int], finish_reason: str) -> float:
    """An answer comes at the end or not at all."""
    return even_share(completion_ids) if finish_reason != "length" else 0.0


def tagged(completion: str) -> float:
    return float("<|im_start|>" in completion)


def think_format(completion: str) -> float:
    """Wants both tags in the completion, although the prompt may have opened the block."""
    return float(completion.count("<think>") == 1 and completion.count("</think>") == 1)


def format_odd(completion_ids: Sequence[int]) -> float:
    return 1 - even_share(completion_ids)


def accuracy_even(completion_ids: Sequence[int]) -> float:
    return even_share(completion_ids)


def more_words(completion_ids: Sequence[int]) -> float:
    """Each even token earns a little: the longer, the more."""
    return sum(i % 2 == 0 for i in completion_ids) / 40


def long_enough(completion_ids: Sequence[int]) -> float:
    """Length and nothing else."""
    return len(completion_ids) / 40


def one_token(completion_ids: Sequence[int]) -> float:
    """The share of one token."""
    return sum(i == 100 for i in completion_ids) / max(1, len(completion_ids))
