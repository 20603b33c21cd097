"""Which framework wrote a log, by its content."""

import re
from collections.abc import Iterable

from leadline.doctor.readers.frameworks import FRAMEWORKS, MILES, SLIME, UNKNOWN, Framework, Key
from leadline.errors import LogError

_MARKS = re.compile("|".join(f"(?P<m{i}>{'|'.join(f.marks)})" for i, f in enumerate(FRAMEWORKS) if f.marks))
LOOKED_AT = 4000
"""Characters of a line in which marks are sought: some of them take time that grows with the square of the length."""
SURE = 2
"""Keys of one framework's own that it takes to recognise it."""


def named(name: str) -> Framework:
    """The framework of a name. Raises LogError: there is none."""
    wanted = name.lower().replace("-", "_")
    for framework in (*FRAMEWORKS, UNKNOWN):
        if framework.name == wanted:
            return framework
    found = from_words(name)
    if found is None:
        known = ", ".join(framework.name for framework in FRAMEWORKS)
        raise LogError(
            f"--framework is {name!r}, but no framework of that name is known. The log cannot be read by its names. "
            f"Use one of: {known}; or leave it out."
        )
    return found


def from_words(text: str) -> Framework | None:
    """The framework that a description names first, such as "open-r1 (trl)"."""
    places = [
        (match.start(), -len(word), place)
        for place, framework in enumerate(FRAMEWORKS)
        for word in framework.words
        if (match := re.search(rf"(?<![\\w-]){re.escape(word)}(?![\\w])", text.lower()))
    ]
    return FRAMEWORKS[min(places)[2]] if places else None


def from_line(line: str) -> Framework | None:
    """The framework that prints such a line."""
    match = _MARKS.search(line[:LOOKED_AT])
    if not match:
        return None
    group = match.lastgroup or next(name for name, text in match.groupdict().items() if text is not None)
    return FRAMEWORKS[int(group[1:])]


def from_keys(keys: Iterable[str]) -> Framework:
    """The framework whose table knows most of the keys; keys that only one table knows count most."""
    scores = [0.0] * len(FRAMEWORKS)
    for key in keys:
        knowing = [place for place, framework in enumerate(FRAMEWORKS) if framework.find(key) is not None]
        for place in knowing:
            literal = key in FRAMEWORKS[place].keys
            scores[place] += 3.0 if literal and len(knowing) == 1 else 1.0
    best = max(range(len(FRAMEWORKS)), key=lambda place: scores[place])
    return FRAMEWORKS[best] if scores[best] >= SURE else UNKNOWN


def narrowed(framework: Framework, keys: Iterable[str]) -> Framework:
    """miles instead of slime, whose names it shares, if a key is there that only miles logs."""
    if framework is not SLIME:
        return framework
    own = ("train/train_rollout_kl", "train/ess_ratio", "rollout/fully_async/", "rollout/tito_")
    return MILES if any(key.startswith(own) for key in keys) else SLIME


def find_key(framework: Framework, key: str, different: dict[str, str | Key]) -> Key | None:
    """Where a key goes in this log: by the log's own differences, the framework's table, or a word all trainers share."""
    special = different.get(key)
    if special is not None:
        return special if isinstance(special, Key) else Key(special)
    found = framework.find(key)
    if found is not None or framework.name == "leadline":
        return found
    if is_bookkeeping(framework, key):
        return None
    return UNKNOWN.find(key) or _unanimous(key)


def is_bookkeeping(framework: Framework, key: str) -> bool:
    """The key numbers or times rows, or is one that its framework writes for itself."""
    return key in framework.steps or any(re.fullmatch(pattern, key) for pattern in framework.ignored)


def _unanimous(key: str) -> Key | None:
    """What every table that lists the very key says of it, if they agree."""
    targets = {
        (target if isinstance(target, str) else target.name): target
        for framework in FRAMEWORKS
        if (target := framework.keys.get(key)) is not None
    }
    if "/" not in key or len(targets) != 1:
        return None
    target = next(iter(targets.values()))
    return target if isinstance(target, Key) else Key(target)
