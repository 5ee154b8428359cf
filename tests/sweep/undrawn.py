"""Loaded by the server of workers: pictures take longer than such small runs, and have tests of their own."""

from __future__ import annotations

import os
from pathlib import Path

import ntkexp.carry_out
from tests.run.test_carry_out import stand_in

ntkexp.carry_out.save_plots = stand_in

FULL = os.environ.get("TESTS_FULL_DISK", "")  # the file for which there is no room

if FULL:
    import errno

    replace = Path.replace

    def moved(partial: Path, place: Path) -> Path:
        if Path(place).name == FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        return replace(partial, place)

    Path.replace = moved  # type: ignore[method-assign, assignment]  # in workers only
