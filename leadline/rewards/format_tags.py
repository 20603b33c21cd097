"""Does the completion keep to a format of tags?"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.errors import ConfigError
from leadline.settings.reward import Decoding

TAGS = ("think", "answer")


def format_tags(prompt: str, completion: str, *, tags: Sequence[str] = TAGS) -> float:
    """1.0 if each of `tags` is opened and closed exactly once, one after the other in this order, else 0.0.

    Text around and inside the tags is free. A first tag that the prompt already opened counts as opened.
    """
    markers = [marker for tag in tags for marker in (f"<{tag}>", f"</{tag}>")]
    text = markers[0] + completion if prompt.rstrip().endswith(markers[0]) else completion
    if any(text.count(marker) != 1 for marker in markers):
        return 0.0
    places = [text.index(marker) for marker in markers]
    return float(places == sorted(places))


def inside(text: str, tag: str) -> str | None:
    """What stands in the last closed <tag>...</tag> of the text; None if there is none."""
    found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1] if found else None


def check_decoding(params: Mapping[str, Any], decoding: Decoding) -> None:
    """Raise ConfigError if `decoding` strips a tag that `format_tags` with these params looks for."""
    markers = {f"<{tag}>" for tag in params.get("tags", TAGS)}
    if decoding.strip_reasoning and decoding.reasoning_open in markers:
        raise ConfigError(
            f"decoding.strip_reasoning is true, but the reward format_tags looks for {decoding.reasoning_open}, which "
            "is stripped. It would be 0 for every completion. Set decoding.strip_reasoning = false (exact_match and "
            "reasoning_gym then take params = {tag = 'answer'}), or leave that tag out of params.tags."
        )
