"""W&B's own run files (`run-ID.wandb`), without wandb: blocks of a LevelDB log with a protobuf in each record."""

from collections.abc import Iterator
from typing import Any

from leadline.doctor.readers.bounds import Source
from leadline.doctor.readers.json_rows import parse
from leadline.doctor.readers.protobuf import Value, fields, text

BLOCK = 32768
HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _CONFIG, _RUN = 2, 5, 17


def wandb_rows(source: Source, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the history; settings go into `options`."""
    for record in _records(source):
        for field, value in fields(record):
            if not isinstance(value, bytes):
                continue
            if field == _HISTORY:
                row = _items(value, 1)
                if row:
                    yield row
            elif field == _CONFIG:
                options.update(_config(value))
            elif field == _RUN:
                for inner, item in fields(value):
                    if inner == 4 and isinstance(item, bytes):
                        options.update(_config(item))


def _records(source: Source) -> Iterator[bytes]:
    """Records put together from their pieces; a block's checksums are not needed to read it."""
    data = source.whole()
    place, held = HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        piece = data[place + HEADER : place + HEADER + length]
        if len(piece) < length:
            source.note("The last record is half-written and was left out.")
            return
        place += HEADER + length
        if kind == _FULL:
            yield piece
        elif kind == _FIRST:
            held = piece
        elif kind in (_MIDDLE, _LAST):
            held += piece
            if kind == _LAST:
                yield held
        else:
            place += BLOCK - place % BLOCK  # padding, or damage: the next block is whole again


def _items(message: bytes, wanted: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field, item in fields(message):
        if field == wanted and isinstance(item, bytes):
            key, value = _item(list(fields(item)))
            if key:
                row[key] = value
    return row


def _item(parts: list[tuple[int, Value]]) -> tuple[str, Any]:
    """Key (or nested key) and the JSON beside it."""
    key = next((text(value) for field, value in parts if field == 1), "")
    nested = "/".join(text(value) for field, value in parts if field == 2)
    written = next((text(value) for field, value in parts if field == 16), "null")
    try:
        value = parse(written)
    except ValueError:
        value = written
    return key or nested, value


def _config(message: bytes) -> dict[str, Any]:
    found = _items(message, 1)
    return {
        key: value["value"] if isinstance(value, dict) and set(value) >= {"value"} else value
        for key, value in found.items()
        if key != "_wandb"
    }
