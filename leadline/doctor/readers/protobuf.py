"""The wire format of protobuf, as far as logs need it."""

import struct
from collections.abc import Iterator

Value = int | bytes | float


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of each field; a malformed rest ends it."""
    place = 0
    while place < len(message):
        try:
            key, place = _varint(message, place)
            kind = key & 7
            if kind == 0:
                value: Value
                value, place = _varint(message, place)
            elif kind == 1:
                (value,) = struct.unpack_from("<d", message, place)
                place += 8
            elif kind == 5:
                (value,) = struct.unpack_from("<f", message, place)
                place += 4
            elif kind == 2:
                length, place = _varint(message, place)
                if place + length > len(message):
                    return
                value = message[place : place + length]
                place += length
            else:
                return
        except (IndexError, struct.error):
            return
        yield key >> 3, value


def text(value: Value) -> str:
    """A field of text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def number(value: Value) -> float | None:
    """A field that is a number."""
    return None if isinstance(value, bytes) else float(value)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[place]
        place += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, place
        shift += 7
        if shift > 63:
            raise IndexError("a varint of more than ten bytes")
