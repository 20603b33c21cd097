"""Is the completion the answer, character by character?"""

from typing import Any

from leadline.rewards.format_tags import inside


def exact_match(
    completion: str, answer: Any, *, strip: bool = True, casefold: bool = False, tag: str | None = None
) -> float | None:
    """1.0 if the completion is the column `answer`, else 0.0; None for a row without an answer.

    `strip` ignores whitespace around both, `casefold` ignores case; with `tag`, what stands in the last
    <tag>...</tag> of the completion is compared, and a completion without it scores 0.0.
    """
    if answer is None:
        return None
    given = completion if tag is None else inside(completion, tag)
    if given is None:
        return 0.0
    return float(_normal(given, strip, casefold) == _normal(str(answer), strip, casefold))


def _normal(text: str, strip: bool, casefold: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if casefold else text
