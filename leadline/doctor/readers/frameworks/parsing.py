"""Pieces that console parsers share. Nothing here evaluates text."""

import re
from collections.abc import Iterator
from typing import Any

NUMBER = r"[-+]?(?:\d[\d_,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity)"
_WRAPPED = rf"(?:(?:np|numpy|torch)\.\w+|tensor|array)\(\s*({NUMBER})[^)]*\)"
_ITEM = re.compile(
    rf"""['"]([^'"]{{1,200}})['"]\s*:\s*(?:{_WRAPPED}|({NUMBER}|None|null|True|False)(?![\w.])|'([^']*)'|"([^"]*)"|(\[[^\[\]]*\]))"""
)
MAX_DICT = 200_000
"""Longest text that is searched for the items of one printed dict."""


def number_text(text: str) -> Any:
    """What stands in a log as a number, a word for none, or text."""
    if text in ("None", "null"):
        return None
    if text in ("True", "False"):
        return float(text == "True")
    return text.replace(",", "").replace("_", "")


def dict_items(text: str) -> dict[str, Any]:
    """The flat items of a printed Python or JSON dict, numbers as text and quoted text as it is; {} if there are none.

    `nan`, `np.float64(0.1)` and `tensor(0.1, device='cuda:0')` are read as the numbers they show.
    """
    items: dict[str, Any] = {}
    for match in _ITEM.finditer(text[:MAX_DICT]):
        key, wrapped, plain, *texts = match.groups()
        shown = wrapped or plain
        items[key] = number_text(shown) if shown else next((text for text in texts if text is not None), "")
    return items


def blocks(lines: Iterator[str], opening: str, longest: int = 2000) -> Iterator[str]:
    """The text of each printed dict, from the brace after a match of `opening` to the brace that closes it, over at
    most `longest` lines."""
    start = re.compile(opening)
    held: list[str] = []
    depth = 0
    for line in lines:
        if not held:
            match = start.search(line)
            if not match:
                continue
            line = line[match.end() - 1 :]
        held.append(line)
        depth += _depth(line)
        if depth <= 0 or len(held) >= longest:
            yield " ".join(held)
            held, depth = [], 0
    if held:
        yield " ".join(held)


def _depth(line: str) -> int:
    return line.count("{") - line.count("}")
