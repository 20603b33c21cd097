"""Functions by name: `package.module:function` or `file.py:function`, as recipes write them."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def function_named(name: str) -> Callable[..., Any]:
    """The function that `name` means. A file is run once, however many of its functions are asked for.

    Raises ImportError, whose message is a fact to put after "but": no such module, file or function, or the import fails.
    """
    place, _, attribute = name.rpartition(":")
    module = _module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(attribute, public) or sorted(public)[:10]
        raise ImportError(f"{place!r} has no function {attribute!r}; it has {', '.join(near) or 'none'}")
    return function  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    try:
        return _of_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # user code runs here: it can raise anything
        raise ImportError(f"importing {place!r} raises {type(error).__name__}: {error}") from error


@cache
def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
