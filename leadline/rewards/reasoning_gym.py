"""What reasoning-gym says of an answer to one of its own questions."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from leadline.rewards.format_tags import inside
from leadline.rewards.isolated import Isolated


def reasoning_gym(completion: str, entry: Mapping[str, Any], task: str, *, tag: str | None = None) -> float:
    """The score, in [0, 1], that the scorer of the row's `task` gives the completion, whitespace around it stripped.

    For rows of `data.source = "reasoning_gym:TASK"`. With `tag`, what stands in the last <tag>...</tag> is scored,
    and a completion without it scores what no answer scores.
    """
    answer = completion if tag is None else inside(completion, tag)
    return float(_score_in_child(task, None if answer is None else answer.strip(), entry))


def score(task: str, answer: str | None, entry: Mapping[str, Any]) -> float:
    """The task's own score. Never returns for some answers (countdown evaluates `9**9**9`): see `Isolated`."""
    return float(_scorer(task)(answer=answer, entry=entry))


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym as gym

    return gym.get_score_answer_fn(task)


_score_in_child = Isolated("leadline.rewards.reasoning_gym:score", imports=["reasoning_gym"])
