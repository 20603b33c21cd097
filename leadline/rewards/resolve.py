"""From the name of a reward to its function."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from leadline.errors import RewardError
from leadline.rewards import REWARDS


def resolve(name: str) -> Callable[..., Any]:
    """The function that `name` means: a built-in, `package.module:function` or `file.py:function`.

    Raises RewardError: no such built-in, module, file or function, or the import fails.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        return _built_in(name)
    module = _import(place, name)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(attribute, public) or sorted(public)[:10]
        raise RewardError(
            f"The reward is {name!r}, but {place!r} has no function {attribute!r}. Nothing could be scored. "
            f"It has: {', '.join(near) or '(none)'}."
        )
    return function  # type: ignore[no-any-return]


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


def _import(place: str, name: str) -> ModuleType:
    try:
        return _import_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # user code runs here: it can raise anything
        raise RewardError(
            f"The reward is {name!r}, but importing {place!r} raises {type(error).__name__}: {error}. Nothing could "
            "be scored. Mend the import, or the name."
        ) from error


@cache
def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
