"""From `package.module:function` or `file.py:function` to the function."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from leadline.errors import ConfigError


def load_function(target: str) -> Callable[..., Any]:
    """The function, static method (`module:Class.method`) or class that `target` names.

    Raises ConfigError: no such module, file or name, or importing it raises.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"TARGET is {target!r}, but it names no function. Nothing could be probed. "
            "Write package.module:function or file.py:function."
        )
    found: Any = _module(place, target)
    for part in name.split("."):
        inside, found = found, getattr(found, part, None)
        if found is None:
            raise ConfigError(
                f"TARGET is {target!r}, but {place} has no {part!r}. Nothing could be probed. {_near(inside, part)}"
            )
    if not callable(found):
        raise ConfigError(
            f"TARGET is {target!r}, but it is a {type(found).__name__}. Only a function can be called. Name a function."
        )
    return found  # type: ignore[no-any-return]


def _near(inside: Any, name: str) -> str:
    public = [key for key, value in vars(inside).items() if callable(value) and not key.startswith("_")]
    return f"It has: {', '.join(get_close_matches(name, public) or sorted(public)[:10]) or '(no function)'}."


def _module(place: str, target: str) -> ModuleType:
    try:
        return _file(Path(place)) if place.endswith(".py") else _package(place)
    except Exception as error:  # the user's code runs here
        raise ConfigError(
            f"TARGET is {target!r}, but importing {place!r} raises {type(error).__name__}: {error}. Nothing could be "
            "probed. Mend the import, or the name."
        ) from error


def _package(name: str) -> ModuleType:
    """As `python -m` would find it: from the working directory, too."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    """The file may import its neighbours, as when it is run."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def where(function: Callable[..., Any]) -> str:
    """File and line, as editors take them; empty for what has no source."""
    try:
        path = inspect.getsourcefile(function)
        return f"{path}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return ""
