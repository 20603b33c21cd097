"""What kind of file something is, by its content."""

import re
from enum import StrEnum

from leadline.doctor.readers.blackbox import is_safetensors
from leadline.doctor.readers.bounds import decoded
from leadline.doctor.readers.json_rows import parse
from leadline.doctor.readers.recognise import from_line


class Kind(StrEnum):
    """What a reader exists for, and what none exists for."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    SQLITE = "sqlite"
    CONFIG = "config"
    """Settings and nothing else."""
    TEXT = "text"
    """A console log, a table, a pasted fragment."""
    SAFETENSORS = "safetensors"
    EMPTY = "empty"
    BINARY = "binary"


_YAML = re.compile(r"^\s*(?:- )?[\w\"'./-]+\s*:(?:\s.*)?$")
_TOML = re.compile(r"^\s*(?:\[\[?[\w.\"-]+\]\]?|[\w.\"-]+\s*=\s*.+)\s*(?:#.*)?$")


def kind_of(head: bytes) -> Kind:
    """The kind of a file whose first bytes these are."""
    if not head.strip():
        return Kind.EMPTY
    if head[:4] == b"PAR1":
        return Kind.PARQUET
    if head[:15] == b"SQLite format 3":
        return Kind.SQLITE
    if head[:4] == b":W&B":
        return Kind.WANDB
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] < b"\x06"):
        return Kind.CONFIG if b"data.pkl" in head or head[:1] == b"\x80" else Kind.BINARY
    if is_safetensors(head):
        return Kind.SAFETENSORS
    if _is_events(head):
        return Kind.TENSORBOARD
    if b"\0" in head[:4096]:
        return Kind.BINARY
    return _kind_of_text(decoded(head))


def _is_events(head: bytes) -> bool:
    """A record of TensorFlow: a length of eight bytes, its checksum, then a protobuf whose first field is a double."""
    return (
        len(head) > 24 and int.from_bytes(head[:8], "little") < 1 << 24 and head[12:13] == b"\x09" and b"\0" in head[:8]
    )


def _kind_of_text(text: str) -> Kind:
    lines = [line for line in text.splitlines() if line.strip()]
    first = lines[0].lstrip("\ufeff").strip()
    if first[0] in "{[" and _is_json_object(first) and first != "{}":
        return Kind.JSONL if len(lines) > 1 or '"log_history"' not in first else Kind.JSON
    if first[0] in "{[" and re.match(r"""[{\[]\s*(?:["{\[}\]]|$)""", first) and not _is_toml_heading(first):
        return Kind.JSON if not re.match(r"\{\s*'", first) else Kind.TEXT
    if any(from_line(line) for line in lines[:2000]):
        return Kind.TEXT
    if _is_csv(lines):
        return Kind.CSV
    body = [line for line in lines if not line.lstrip().startswith(("#", "---", "//"))]
    if body and sum(bool(_TOML.match(line)) for line in body) >= 0.7 * len(body) and any("=" in x for x in body):
        return Kind.CONFIG
    if body and sum(bool(_YAML.match(line)) for line in body) >= 0.8 * len(body) and not _all_numbers(body):
        return Kind.CONFIG
    return Kind.TEXT


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(parse(line), dict)
    except ValueError:
        return False


def _is_toml_heading(line: str) -> bool:
    return bool(re.fullmatch(r"\[\[?[A-Za-z_][\w.\"-]*\]\]?", line))


def _is_csv(lines: list[str]) -> bool:
    """A heading of names, and rows of as many cells of which most are numbers."""
    for separator in (",", "\t", ";"):
        names = lines[0].split(separator)
        if len(names) < 2 or len(lines) < 2 or any(_is_number(name) for name in names):
            continue
        cells = lines[1].split(separator)
        if len(cells) == len(names) and sum(_is_number(cell) or not cell.strip('" ') for cell in cells) * 2 >= len(
            cells
        ):
            return True
    return False


def _is_number(text: str) -> bool:
    try:
        float(text.strip('" '))
    except ValueError:
        return False
    return True


def _all_numbers(lines: list[str]) -> bool:
    """`name: number` throughout is a pasted summary of metrics rather than settings."""
    return all(_is_number(line.partition(":")[2]) for line in lines)
