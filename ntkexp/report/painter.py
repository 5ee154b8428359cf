"""The process that draws the pictures of a run. It imports matplotlib while the run computes.

`python -m ntkexp.report.painter` reads a run folder as JSON from stdin. For each picture file it writes a line of JSON
to stdout, [name, content], and `null` at the end. It writes no files itself: the process that holds the lock of the run
writes them, so a killed painter leaves nothing. It ends with the process that started it. If it fails, or has ended
after a long wait, the computing process draws the pictures and raises the errors.
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
"""A function from a run folder to the names and contents of the files in `plots`."""

# -P: import no module from the user's folder
PAINTER_COMMAND = [sys.executable, "-P", "-m", "ntkexp.report.painter"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads take time to start
END = "null\n"
"""The last line that the painter writes."""
MAX_WAIT_SECONDS = 60.0  # then the painter ends and frees its memory; a long run can draw itself


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch off garbage collection, which takes a fifth of the time of a report.

    Tables and pictures consist of many small objects that live to the end.

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
    """Yield the function that draws: in this process if it has imported matplotlib, else in another one."""
    if "matplotlib.figure" in sys.modules:
        yield draw_here
    else:
        with another_process() as process:
            yield partial(draw_elsewhere, process) if process else draw_here


@contextmanager
def another_process() -> Iterator[subprocess.Popen[str] | None]:
    """Start the painter in its own session, which Ctrl-C does not reach. Yield None if that fails."""
    try:
        process = subprocess.Popen(
            PAINTER_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | ONE_THREAD,
        )
    except OSError:
        yield None
        return
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def draw_here(folder: Path) -> Iterator[tuple[str, str]]:
    """Draw in this process."""
    from ntkexp.report.plots.run_plots import all_files_of  # noqa: PLC0415  slow
    from ntkexp.report.run import read_run  # noqa: PLC0415  the same

    with uncollected():
        yield from all_files_of(read_run(folder))


def draw_elsewhere(process: subprocess.Popen[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Draw in the painter. If it does not finish, draw everything in this process."""
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


# --- In the painter, which imports matplotlib at once, so that it is ready at the end of the run.


def main() -> None:
    """Import matplotlib, wait for a run folder, and draw. End when stdin closes, or after `MAX_WAIT_SECONDS`."""
    with uncollected():
        from matplotlib.figure import Figure  # noqa: PLC0415  slow, and the process that computes needs none of it

        from ntkexp.report.plots.rendering import svg  # noqa: PLC0415  the same
        from ntkexp.report.plots.run_plots import gallery  # noqa: PLC0415  the same

        list(gallery())  # imports the file of every picture
        figure = Figure(layout="constrained")
        figure.subplots()
        svg(figure)  # an empty picture, which loads fonts and other late imports
        if select([sys.stdin], [], [], MAX_WAIT_SECONDS)[0]:
            line = sys.stdin.readline()
            if line:
                draw_in_two(Path(json.loads(line)))


def draw_in_two(folder: Path) -> None:
    """Draw in two processes. The second one writes its pictures after the first one has written its own."""
    from ntkexp.report.plots.run_plots import gallery  # noqa: PLC0415  slow

    # a pipe holds the numbers of the pictures, each of which one of the processes reads
    waiting, filled = os.pipe()
    os.write(filled, bytes(range(len(list(gallery())))))
    os.close(filled)

    theirs, ours = os.pipe()
    second = os.fork() == 0
    threading.Thread(target=leave_with_parent, daemon=True).start()
    if second:
        os.close(theirs)  # else it would wait for itself if the first process has died
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
    """Draw the pictures that the other process has not begun, and yield a line for each file."""
    from ntkexp.report.plots.run_plots import files_of, gallery  # noqa: PLC0415  slow
    from ntkexp.report.run import read_run  # noqa: PLC0415  the same

    run = read_run(folder)
    pictures = list(gallery())
    while number := os.read(waiting, 1):
        for file in files_of(run, *pictures[number[0]]):
            yield f"{json.dumps(file)}\n"


def leave_with_parent() -> None:
    """End this process when the parent has ended."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
