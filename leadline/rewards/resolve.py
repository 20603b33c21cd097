from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from leadline.errors import RewardError
from leadline.functions import function_named
from leadline.rewards import REWARDS


def resolve(name: str) -> Callable[..., Any]:
    """The function that `name` means: a built-in, `package.module:function` or `file.py:function`.

    Raises RewardError: no such built-in, module, file or function, or the import fails.
    """
    if ":" not in name:
        return _built_in(name)
    try:
        return function_named(name)
    except ImportError as error:
        raise RewardError(
            f"The reward is {name!r}, but {error}. Nothing could be scored. Mend the import, or the name."
        ) from error


def function_name(function: Callable[..., Any]) -> str:
    """A name for the logs, also for a partial or a callable object."""
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def _built_in(name: str) -> Callable[..., Any]:
    if name in REWARDS:
        return REWARDS[name]
    near = get_close_matches(name, REWARDS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise RewardError(
        f"The reward is {name!r}, but there is no such built-in. Nothing could be scored.{hint} Use one of "
        f"{', '.join(REWARDS)}, package.module:function, file.py:function, or model:DIRECTORY."
    )
