"""How much lies in a place: a folder counts as all the files in it."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG


def size_of(path: Path) -> int | None:
    """Find the bytes of a file, or of all files in a folder; None if there is neither."""
    try:
        found = path.stat()
    except OSError:
        return None
    if S_ISREG(found.st_mode):
        return found.st_size
    return sum(os.stat(os.path.join(place, name)).st_size for place, _, names in os.walk(path) for name in names)
