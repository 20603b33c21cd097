"""A log that grows, in pieces of whole lines: what `--watch` reads, with memory that does not grow with the log."""

import json
import os
import select
from collections.abc import Iterator
from pathlib import Path

from leadline.errors import LogError

PIECE = 4 << 20
"""Bytes of a piece at most; a longer line is passed over."""
HEAD = 1 << 16
BEGINNING = 256
"""Bytes by which a log that was started anew is told from one that grew."""
BINARY = (b"\x1f\x8b", b"PAR1", b"SQLite", b"PK\x03\x04")


class GrowingFile:
    """The lines that were appended to a file since the last look."""

    ended = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0
        self._beginning = b""

    def pieces(self) -> Iterator[str]:
        """Whole lines that are new, in order; a half-written last one is kept for the next look.

        A file that was replaced, got shorter or begins otherwise is read from its start. Raises LogError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                now = os.fstat(file.fileno())
                beginning = file.read(BEGINNING)
                if now.st_size < self._offset or now.st_ino != self._inode or not beginning.startswith(self._beginning):
                    self._offset, self._inode = 0, now.st_ino
                self._beginning = beginning
                yield from self._new_lines(file.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            raise LogError(
                f"PATH is {str(self.path)!r}, but it cannot be read ({error.strerror}). There is nothing to follow. "
                "Name a file that is yours to read."
            ) from error

    def _new_lines(self, file: int) -> Iterator[str]:
        while True:
            block = os.pread(file, PIECE, self._offset)
            end = block.rfind(b"\n") + 1
            if end:
                self._offset += end
                yield _text(block[:end])
            elif len(block) == PIECE:
                self._offset += PIECE  # inside a line that is longer than a piece
            else:
                return


class GrowingInput:
    """The lines that came through a pipe since the last look."""

    def __init__(self, file: int = 0, wait: float = 0.0) -> None:
        self.ended = False
        self._file = file
        self._wait = wait
        self._rest = b""

    def pieces(self) -> Iterator[str]:
        """Whole lines that are new, in order; waits up to `wait` seconds for the first. `ended` is set at the end."""
        wait = self._wait
        while not self.ended and select.select([self._file], [], [], wait)[0]:
            wait = 0.0
            block = os.read(self._file, HEAD)
            self.ended = not block
            whole, self._rest = self._split(block)
            if whole:
                yield _text(whole)

    def _split(self, block: bytes) -> tuple[bytes, bytes]:
        held = self._rest + block
        end = len(held) if self.ended else held.rfind(b"\n") + 1
        return held[:end], held[end:] if len(held) - end < PIECE else b""


def _text(lines: bytes) -> str:
    return lines.decode("utf-8", errors="replace")


def grows_by_lines(path: Path) -> bool:
    """Whether a file is a log to which lines are appended, rather than one document that is written again as a whole."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    if head.startswith(BINARY) or b"\0" in head:
        return False
    first = head.lstrip().split(b"\n", 1)[0].strip()
    if first.startswith(b"["):  # console lines begin with [time] or [rank 0]
        return first != b"[" and not first[1:].lstrip().startswith((b"{", b"[", b"]")) and not _is_json(first)
    if first.startswith(b"{") and not first.startswith(b"{'"):  # {'loss': 0.0} is a printed dict
        return _is_json(first) and path.suffix != ".json"
    return True


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
