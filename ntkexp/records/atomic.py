"""A file is there whole, or not at all: it is written beside its place and moved into it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # how the name of a file ends that is not yet in its place


@contextmanager
def being_written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, moved into its place at the end: a kill or a power cut leaves the old file or the new one."""
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")  # two writers have two
    opening = opened(partial)
    try:
        with opening as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # a full disk: what was begun would keep it full
        partial.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those around it, unless it is there.

    In /proc and its likes there is no such file, says the system, though one was to be made: who calls knows what to
    say of places where that is not allowed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        raise no_place(folder) from None
    except RecursionError:  # it goes up by calls
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(folder)) from None


def opened(partial: Path) -> BinaryIO:
    """Open a new file in a folder that is there: none is written over, and no link is followed."""
    try:
        return partial.open("xb")
    except FileNotFoundError:
        raise no_place(partial.parent) from None


def no_place(folder: Path) -> PermissionError:
    """No file and no folder can be made here."""
    return PermissionError(errno.EACCES, "Nothing can be written there", str(folder))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes, whole or not at all."""
    with being_written(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
