"""`python -m ntkexp.report.plots.beside` is a process that draws for another: a run folder, as JSON, on its stdin.

What it drew is a line of JSON a file on stdout, [name, content], and `null` when that was all. It begins to import when
it is started, so that it is ready when the run is; then it forks, as nothing else is left to do for the second core. It
ends when its stdin is closed, and when nobody asked for a minute.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from select import select

from matplotlib.figure import Figure

from ntkexp.report.painter import END, uncollected
from ntkexp.report.plots.run_plots import files_of, gallery, svg
from ntkexp.report.run import read_run

PATIENCE = 60.0  # seconds; a longer run has time enough to draw by itself, and better use for the memory


def main() -> None:
    """Get ready, wait, and draw."""
    with uncollected():
        get_ready()
        if select([sys.stdin], [], [], PATIENCE)[0] and (line := sys.stdin.readline()):
            draw_in_two(Path(json.loads(line)))


def get_ready() -> None:
    """Import every picture's file, and draw nothing once, which loads fonts and all that drawing loads late."""
    _ = dict(gallery())
    figure = Figure(layout="constrained")
    figure.subplots()
    svg(figure)


def draw_in_two(folder: Path) -> None:
    """Draw with a second process, which keeps what it drew until this one has drawn its part."""
    waiting, (theirs, ours) = queue(len(list(gallery()))), os.pipe()
    second = os.fork() == 0
    threading.Thread(target=leave_with_parent, daemon=True).start()
    if second:
        os.close(theirs)  # else it would wait for itself, where the first process died and reads no more
        os.close(1)
        content = "".join([*lines(folder, waiting), END])
        with os.fdopen(ours, "w") as pipe:
            pipe.write(content)
        os._exit(0)
    os.close(ours)
    for line in lines(folder, waiting):
        say(line)
    with os.fdopen(theirs) as pipe:
        for line in pipe:
            say(line)


def queue(count: int) -> int:
    """Fill a pipe with the numbers of the pictures: each is read once, by whichever process comes first."""
    waiting, filled = os.pipe()
    os.write(filled, bytes(range(count)))
    os.close(filled)
    return waiting


def lines(folder: Path, waiting: int) -> Iterator[str]:
    """Draw those pictures that nobody else has taken, as lines."""
    run, pictures = read_run(folder), list(gallery())
    while number := os.read(waiting, 1):
        for file in files_of(run, *pictures[number[0]]):
            yield f"{json.dumps(file)}\n"


def say(line: str) -> None:
    """Hand a line over at once."""
    sys.stdout.write(line)
    sys.stdout.flush()


def leave_with_parent() -> None:
    """Wait until nobody is there any more."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
