"""How much lies in a place: a folder counts as all the files in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG


def size_of(path: Path) -> int | None:
    """Find the bytes of a file, or of all files in a folder; None if there is neither."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if S_ISREG(found.st_mode) else in_folder(str(path))


def in_folder(path: str) -> int:
    """Add up the files in a folder; a link to a folder is not followed, and counts as the folder itself."""
    found = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a link to nothing
                found += in_folder(entry.path) if entry.is_dir(follow_symlinks=False) else entry.stat().st_size
    return found
