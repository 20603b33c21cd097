"""Opening what may be huge, packed, half-written or hostile, with bounded memory and work."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from leadline.errors import LogError

HEAD = 1 << 16
"""Bytes by which a file is recognised."""
MAX_LINE = 8 << 20
"""A longer line is passed over: no metrics row is that long."""
MAX_DOCUMENT = 1 << 30
"""Bytes of a file that has to be held as a whole."""
MAX_TYPED = 1 << 28
"""Characters taken from standard input."""
MAX_RATIO = 200
MIN_UNPACKED = 64 << 20
"""A packed file may unpack to `MAX_RATIO` times its size, or to `MIN_UNPACKED` bytes: logs pack 5 to 30 times."""
_BLOCK = 1 << 20
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"


@dataclass
class Source:
    """Something to read, which can be opened again and again. `notes` collects what had to be left out."""

    name: str
    open_raw: Callable[[], BinaryIO]
    size: int
    path: Path | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Keeps a sentence once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def head(self) -> bytes:
        """The first bytes, unpacked."""
        for block in self.blocks():
            return block[:HEAD]
        return b""

    def blocks(self) -> Iterator[bytes]:
        """The content, unpacked, in blocks. Raises LogError: unreadable, or a packed file that unpacks without end."""
        try:
            with self.open_raw() as raw:
                packed = raw.read(2) == _GZIP
                raw.seek(0)
                yield from self._unpacked(raw) if packed else iter(lambda: raw.read(_BLOCK), b"")
        except OSError as error:
            raise LogError(
                f"PATH is {self.name!r}, but it cannot be read ({error.strerror or error}). There is nothing to "
                "examine. Name a file that is yours to read."
            ) from error

    def start(self, length: int) -> bytes | None:
        """The content at once if it is no longer than that; None if it is."""
        held, size = [], 0
        for block in self.blocks():
            size += len(block)
            if size > length:
                return None
            held.append(block)
        return b"".join(held)

    def whole(self) -> bytes:
        """The content at once. Raises LogError: too long to be held."""
        held = self.start(MAX_DOCUMENT)
        if held is None:
            raise LogError(
                f"PATH is {self.name!r}, but it holds more than {MAX_DOCUMENT >> 20} MiB in one document. Reading it "
                "would fill the memory. Give a log of one row a line (JSONL)."
            )
        return held

    def lines(self) -> Iterator[bytes]:
        """Its lines without their ends. Lines over `MAX_LINE` are passed over, and noted."""
        rest, passing = b"", False
        for block in self.blocks():
            *lines, tail = block.split(b"\n")
            if lines:
                first = rest + lines[0]
                if passing or len(first) > MAX_LINE:
                    self.note(f"A line of more than {MAX_LINE >> 20} MiB was passed over.")
                else:
                    yield first
                yield from lines[1:]
                rest, passing = tail, False
            elif not passing:
                rest += tail
                if len(rest) > MAX_LINE:
                    rest, passing = b"", True
        if passing:
            self.note(f"A line of more than {MAX_LINE >> 20} MiB was passed over.")
        elif rest:
            yield rest

    def _unpacked(self, raw: BinaryIO) -> Iterator[bytes]:
        allowed, size = max(MIN_UNPACKED, MAX_RATIO * self.size), 0
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                while block := file.read(_BLOCK):
                    size += len(block)
                    if size > allowed:
                        self.note(f"The packed file unpacks to more than {allowed >> 20} MiB; the rest was not read.")
                        return
                    yield block
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.note("The packed file ends in the middle or is damaged; what came before was read.")


def source_of(origin: Path | TextIO) -> Source:
    """A file or a text stream, such as standard input, as a source. Raises LogError: it does not exist."""
    if isinstance(origin, Path):
        try:
            size = origin.stat().st_size
        except OSError as error:
            raise LogError(
                f"PATH is {str(origin)!r}, but it cannot be read ({error.strerror}). There is nothing to examine. "
                "Name a run directory, a log or a config; - is standard input."
            ) from error
        source = Source(str(origin), lambda: origin.open("rb"), size, origin)
        return _as_utf8(source) if source.head()[:2] in UTF_16 else source
    data = origin.read(MAX_TYPED).encode("utf-8", "surrogateescape")
    name = getattr(origin, "name", "") or "text"
    return Source("standard input" if name == "<stdin>" else str(name), lambda: io.BytesIO(data), len(data))


def _as_utf8(source: Source) -> Source:
    """What Windows' shells write, in the encoding of everything else."""
    data = (source.start(MAX_TYPED) or b"").decode("utf-16", "replace").encode()
    return Source(source.name, lambda: io.BytesIO(data), len(data), source.path)


def decoded(line: bytes) -> str:
    """A line as text; bytes that are none are replaced."""
    return line.decode("utf-8", "replace")
