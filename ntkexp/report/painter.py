"""A run's pictures are drawn by a process beside the one that computes: it learns how to draw while the run goes on.

`python -m ntkexp.report.painter` is that process. It is given a run folder, as JSON, on its stdin, and writes no file:
what it drew is a line of JSON a file on its stdout, [name, content], and `null` when that was all. The process that
holds the lock of the run writes the files: one that is killed leaves nothing, and it ends with the one that started it.
Where it fails, or has ended after a long wait, the process that computes draws them itself, and what is wrong is
raised there.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from select import select
from typing import TypeAlias

Paint: TypeAlias = Callable[[Path], Iterator[tuple[str, str]]]
"""From the folder of a run to the names and contents of the files in its `plots`."""

BESIDE = [
    sys.executable,
    "-P",
    "-m",
    "ntkexp.report.painter",
]  # -P: no module of the user's folder is meant
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}  # more are never needed, and take time to start
END = "null\n"
"""The last line of the process."""
PATIENCE = (
    60.0  # seconds; a longer run has time enough to draw them itself, and better use for the memory
)


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch garbage collection off: tables and pictures consist of many small objects that live to the end, and to
    look for garbage among them takes a fifth of the time of a report.

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


# --- In the process that computes.


@contextmanager
def painter() -> Iterator[Paint]:
    """Give what draws: this process if it knows how to by now, which saves the other one its imports."""
    if "matplotlib.figure" in sys.modules:
        yield draw_here
    else:
        with another_process() as process:
            yield partial(draw_beside, process) if process else draw_here


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


def draw_here(folder: Path) -> Iterator[tuple[str, str]]:
    from ntkexp.report.plots.run_plots import all_files_of  # noqa: PLC0415  slow, and the other process has it
    from ntkexp.report.run import read_run  # noqa: PLC0415  the same

    with uncollected():
        yield from all_files_of(read_run(folder))


def draw_beside(process: subprocess.Popen[str], folder: Path) -> Iterator[tuple[str, str]]:
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
    yield from draw_here(folder)


# --- In the process beside it, which begins to import when it is started, so that it is ready when the run is.


def main() -> None:
    """Import, wait for orders, and draw; end when stdin is closed, or after a minute without an order."""
    with uncollected():
        from matplotlib.figure import Figure  # noqa: PLC0415  slow, and the process that computes needs none of it

        from ntkexp.report.plots.rendering import svg  # noqa: PLC0415  the same
        from ntkexp.report.plots.run_plots import gallery  # noqa: PLC0415  the same

        list(gallery())  # imports the file of every picture
        figure = Figure(layout="constrained")
        figure.subplots()
        svg(figure)  # nothing, which loads fonts and all that drawing loads late
        if select([sys.stdin], [], [], PATIENCE)[0] and (line := sys.stdin.readline()):
            draw_in_two(Path(json.loads(line)))


def draw_in_two(folder: Path) -> None:
    """Draw with a second process, as nothing else is left to do for the second core; it keeps what it drew until this
    one has drawn its part.
    """
    from ntkexp.report.plots.run_plots import gallery  # noqa: PLC0415  slow

    # A pipe holds the numbers of the pictures: each is read once, by whichever process comes first
    waiting, filled = os.pipe()
    os.write(filled, bytes(range(len(list(gallery())))))
    os.close(filled)

    theirs, ours = os.pipe()
    second = os.fork() == 0
    threading.Thread(target=leave_with_parent, daemon=True).start()
    if second:
        os.close(
            theirs
        )  # else it would wait for itself, where the first process died and reads no more
        os.close(1)
        content = "".join([*lines(folder, waiting), END])
        with os.fdopen(ours, "w") as pipe:
            pipe.write(content)
        os._exit(0)
    os.close(ours)
    for line in lines(folder, waiting):
        sys.stdout.write(line)
        sys.stdout.flush()
    with os.fdopen(theirs) as pipe:
        for line in pipe:
            sys.stdout.write(line)
            sys.stdout.flush()


def lines(folder: Path, waiting: int) -> Iterator[str]:
    """Draw the pictures that are not taken yet, and report each on a line."""
    from ntkexp.report.plots.run_plots import files_of, gallery  # noqa: PLC0415  slow
    from ntkexp.report.run import read_run  # noqa: PLC0415  the same

    run, pictures = read_run(folder), list(gallery())
    while number := os.read(waiting, 1):
        for file in files_of(run, *pictures[number[0]]):
            yield f"{json.dumps(file)}\n"


def leave_with_parent() -> None:
    """Wait until the parent is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
