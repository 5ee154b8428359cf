"""A run's pictures are drawn by a process beside the one that computes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

# --- Tables and pictures consist of many small objects that live to the end: to look for garbage there is in vain.


@contextmanager
def uncollected() -> Iterator[None]:
    """Let nobody look for garbage, which takes a fifth of the time of a report.

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


# --- A run's pictures are drawn by a process beside the one that computes: it learns how to draw while the run goes
# on.
#
# That process writes no file. It hands over what it drew, and who holds the lock of the run writes it: a process
# that is killed leaves nothing, and it ends with the one that started it. Where it fails, or has left as nobody
# asked it for long, this process draws by itself, and what is wrong is raised here.


Paint: TypeAlias = Callable[[Path], Iterator[tuple[str, str]]]
"""From the folder of a run to the names and contents of the files in its `plots`."""

BESIDE = [sys.executable, "-P", "-m", "ntkexp.report.plots.beside"]  # -P: no module of the user's folder is meant
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # more are never needed, and take time to start
END = "null\n"
"""The line that the process says last."""


@contextmanager
def painter() -> Iterator[Paint]:
    """Give what draws: this process if it knows how to by now, which saves the other one its imports."""
    if "matplotlib.figure" in sys.modules:
        yield here
    else:
        with another_process() as process:
            yield partial(beside, process) if process else here


@contextmanager
def another_process() -> Iterator[subprocess.Popen[str] | None]:
    """Start the process, of a session of its own, so that no Ctrl-C ends it too early; give none if none can be."""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            BESIDE, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, start_new_session=True,
            env=os.environ | ONE_THREAD,
        )  # fmt: skip
    except OSError:
        yield None
        return
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def here(folder: Path) -> Iterator[tuple[str, str]]:
    """Draw in this process."""
    from ntkexp.report.plots.run_plots import all_files_of  # noqa: PLC0415  slow, and the other process has it
    from ntkexp.report.run import read_run  # noqa: PLC0415  the same

    with uncollected():
        yield from all_files_of(read_run(folder))


def beside(process: subprocess.Popen[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Let the other process draw, and draw all of it anew if that does not come to its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{json.dumps(str(folder.absolute()))}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line == END:
                return
            name, content = json.loads(line)
            yield name, content
    except (OSError, ValueError):
        pass
    yield from here(folder)
