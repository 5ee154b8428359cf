"""A file is there whole, or not at all: it is written beside its place and moved into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # how the name of a file ends that is not yet in its place


@contextmanager
def being_written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, moved into its place at the end: a kill or a power cut leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")  # two writers have two
    file = partial.open("xb")  # a file that is there is not written over, and a link not followed
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # a full disk: what was begun would keep it full
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes, whole or not at all."""
    with being_written(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
