"""TensorBoard event files, without TensorFlow: records of a length, a checksum and a protobuf."""

import struct
from collections.abc import Iterator
from typing import Any

from leadline.doctor.readers.bounds import Source
from leadline.doctor.readers.protobuf import fields, number, text

MAX_RECORD = 64 << 20


def event_rows(source: Source) -> Iterator[dict[str, Any]]:
    """One row for each event with scalars: `step` and the tags."""
    for record in _records(source):
        row = _row(record)
        if row:
            yield row


def _records(source: Source) -> Iterator[bytes]:
    held = b""
    for block in source.blocks():
        held += block
        start = 0
        while len(held) - start >= 12:
            (length,) = struct.unpack_from("<Q", held, start)
            if length > MAX_RECORD:
                source.note("The event file is damaged in the middle; what came before was read.")
                return
            if len(held) - start < length + 16:
                break
            yield held[start + 12 : start + 12 + length]
            start += length + 16
        held = held[start:]
    if held:
        source.note("The last event is half-written and was left out.")


def _row(record: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    step = 0
    for field, value in fields(record):
        if field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5 and isinstance(value, bytes):
            for inner, item in fields(value):
                if inner == 1 and isinstance(item, bytes):
                    _scalar(item, row)
    return {"step": step, **row} if row else {}


def _scalar(item: bytes, row: dict[str, Any]) -> None:
    tag, value = "", None
    for field, content in fields(item):
        if field == 1:
            tag = text(content)
        elif field == 2:
            value = number(content)
        elif field == 8 and isinstance(content, bytes):
            value = _tensor(content)
    if tag and value is not None:
        row[tag] = value


def _tensor(content: bytes) -> float | None:
    """A tensor of one number, single (1) or double (2)."""
    kind, shape, value = 0, 0, None
    for field, item in fields(content):
        if field == 1 and isinstance(item, int):
            kind = item
        elif field == 2 and isinstance(item, bytes):
            shape = sum(1 for inner, _ in fields(item) if inner == 2)
        elif isinstance(item, bytes) and field in (4, 5, 6):
            form = {1: "<f", 2: "<d"}.get(kind)
            if form and len(item) == struct.calcsize(form):
                (value,) = struct.unpack(form, item)
        elif field in (5, 6):
            value = number(item)
    return value if shape == 0 else None
