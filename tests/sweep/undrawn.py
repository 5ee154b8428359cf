"""The server of workers loads this file, so that workers draw no pictures, which take longer than small runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import ntkexp.run.execute
from tests.run.test_execute import stand_in

FULL = os.environ.get("TESTS_FULL_DISK", "")  # the file that does not fit

patch, replace = pytest.MonkeyPatch(), Path.replace  # never undone: workers end


def moved(partial: Path, place: Path) -> Path:
    """Raise the error of a full disk for one file."""
    if place.name == FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
    return replace(partial, place)


patch.setattr(ntkexp.run.execute, "draw_run", stand_in)
patch.setattr(Path, "replace", moved)
