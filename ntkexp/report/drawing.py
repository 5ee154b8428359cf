"""Draw the pictures of a run folder at the end of the run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    Tables and pictures consist of many small objects that live until the end. Garbage
    collection would free none of them, and would take a fifth of the time of a report.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def draw_run(folder: Path) -> dict[str, str]:
    """Draw all pictures of a run. Return the contents of the picture files by name."""
    # import here: matplotlib is slow to import, and a run needs it only at its end
    from ntkexp.report.plots.run_plots import all_files_of  # noqa: PLC0415
    from ntkexp.report.run import read_run  # noqa: PLC0415

    with uncollected():
        return dict(all_files_of(read_run(folder)))
