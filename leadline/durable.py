"""Files and directories that are either whole or not there, whenever the process is killed or the power fails."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def partial_file(target: Path) -> Iterator[Path]:
    """A hidden sibling to write to (a file or a directory); on leaving, it takes the target's place in one rename.

    If anything fails, the sibling is removed and the target is what it was.
    """
    partial = target.with_name(f".{target.name}.partial")
    remove(partial)
    try:
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        partial.replace(target)
        sync(target.parent)
    except BaseException:
        remove(partial)
        raise


def write_whole(target: Path, content: bytes) -> None:
    """The file has this content, or the one it had before."""
    with partial_file(target) as partial:
        partial.write_bytes(content)


def remove(path: Path) -> None:
    """The file or directory, if any, is gone. A kill half-way leaves at most a hidden leftover."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith("."):
        # half a directory must never look like a whole one
        path = path.rename(path.with_name(f".{path.name}.removed.partial"))
    shutil.rmtree(path)


def leftovers(folder: Path) -> list[Path]:
    """What a kill left unfinished in the folder and in the folders right below it."""
    return [*folder.glob(".*.partial"), *folder.glob("*/.*.partial")]


def sync(path: Path) -> None:
    """The file's content, or the directory's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
