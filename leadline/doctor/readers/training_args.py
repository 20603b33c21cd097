"""Settings out of `training_args.bin` without running it: its opcodes are walked, nothing is imported or called."""

import io
import lzma
import pickletools
import zipfile
import zlib
from typing import Any

MAX_PICKLE = 4 << 20
MAX_OPCODES = 200_000

_EMPTY = {"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"}
_PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "INT", "LONG",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINSTRING", "BINSTRING", "STRING",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class Opaque:
    """Stands for an object that would have to be built: only its name is known, if that."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.state: dict[str, Any] = {}
        self.arguments: tuple[Any, ...] = ()


class _Mark: ...


DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError)
"""What zipfile raises for an archive that is damaged, encrypted, or compressed in an unknown way."""


def read_training_args(data: bytes) -> dict[str, Any] | None:
    """The plain values among the attributes of the pickled arguments; None if the file holds no such pickle."""
    pickled = _pickle_of(data)
    if pickled is None:
        return None
    try:
        top = _walk(pickled)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        return None
    if not isinstance(top, Opaque) or not top.state:
        return None
    return {name: plain for name, value in top.state.items() if (plain := _plain(value)) is not None or value is None}


def _pickle_of(data: bytes) -> bytes | None:
    if data[:1] == b"\x80":
        return data[:MAX_PICKLE]
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("data.pkl") and entry.file_size <= MAX_PICKLE:
                    with archive.open(entry) as file:
                        return file.read(MAX_PICKLE)
    except DAMAGED:
        return None  # no settings: `loading` says so
    return None


def _walk(pickled: bytes) -> Any:
    """The value at the top of the stack, with `Opaque` wherever the pickle asks for something to be called."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        name = opcode.name
        if name == "STOP" or count > MAX_OPCODES:
            break
        if name in _PLAIN:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            stack.append(_Mark())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if name == "MEMOIZE" else int(str(argument))] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(str(argument))])
        else:
            _shape(name, argument, stack)
    return stack[-1] if stack else None


def _shape(name: str, argument: Any, stack: list[Any]) -> None:
    """The opcodes that put what is on the stack together."""
    if name in ("SETITEM", "SETITEMS"):
        items = _marked(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        if isinstance(stack[-1], dict):
            stack[-1].update({str(key): value for key, value in zip(items[::2], items[1::2], strict=True)})
    elif name in ("APPEND", "APPENDS", "ADDITEMS"):
        items = [stack.pop()] if name == "APPEND" else _marked(stack)
        if isinstance(stack[-1], list):
            stack[-1].extend(items)
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        size = int(name[-1])
        stack[-size:] = [tuple(stack[-size:])]
    elif name in ("TUPLE", "LIST", "FROZENSET", "DICT"):
        items = _marked(stack)
        stack.append(dict(zip(map(str, items[::2]), items[1::2], strict=True)) if name == "DICT" else tuple(items))
    elif name == "GLOBAL":
        stack.append(Opaque(str(argument).rpartition(" ")[2]))
    elif name == "STACK_GLOBAL":
        stack[-2:] = [Opaque(str(stack[-1]))]
    elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
        size = 3 if name == "NEWOBJ_EX" else 2
        parts = stack[-size:]
        made = Opaque(getattr(parts[0], "name", ""))
        made.arguments = parts[1] if isinstance(parts[1], tuple) else ()
        stack[-size:] = [made]
    elif name == "BUILD":
        state = stack.pop()
        if isinstance(stack[-1], Opaque) and isinstance(state, dict):
            stack[-1].state.update(state)
    elif name in ("POP", "POP_MARK"):
        stack.pop() if name == "POP" else _marked(stack)
    elif name == "BINPERSID":
        stack[-1] = Opaque("storage")
    elif name == "DUP":
        stack.append(stack[-1])
    elif name not in ("PROTO", "FRAME"):
        stack.append(Opaque(name))


def _marked(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while not isinstance(top := stack.pop(), _Mark):
        items.append(top)
    return items[::-1]


def _plain(value: Any, depth: int = 0) -> Any:
    """The value if it can stand in a config; an enum by the value it was made from; None for other objects."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Opaque):
        only = value.arguments[0] if len(value.arguments) == 1 else None
        return only if isinstance(only, str | int | float) else value.name if value.name.startswith("float") else None
    if depth > 4:
        return None
    if isinstance(value, dict):
        return {name: _plain(item, depth + 1) for name, item in list(value.items())[:1000]}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value[:1000]]
    return None
