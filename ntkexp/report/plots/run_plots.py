"""All pictures of a run, as SVG to look at and CSV for the next plot: the same bytes each time."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import pandas as pd
from matplotlib.figure import Figure

from ntkexp.chapter import files
from ntkexp.records.atomic import write_atomically
from ntkexp.report.plots import figures
from ntkexp.report.plots.style import house_style
from ntkexp.report.run import Run
from ntkexp.report.table import as_csv

Draw: TypeAlias = Callable[[Run], Figure | None]
Table: TypeAlias = Callable[[Run], pd.DataFrame]

# what matplotlib would write about itself and the time
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
NO_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
"""What no XML may hold, in UTF-8: most control characters, and two that are none."""


def gallery() -> Iterator[tuple[str, Draw]]:
    """Find the name of each picture and the function that draws it: the files in `figures`."""
    for name in files(figures):
        yield name, import_module(f"{figures.__name__}.{name}").draw


def numbers(name: str) -> Table:
    """Find the function that gives the numbers in a picture."""
    table: Table = import_module(f"{figures.__name__}.{name}").table
    return table


def figure_of(run: Run, draw: Draw) -> Figure | None:
    """Draw one picture, if it applies to the run."""
    with house_style():
        return draw(run)


def files_of(run: Run, name: str, draw: Draw) -> Iterator[tuple[str, str]]:
    """Give the names and contents of the files of one picture: it, and the numbers in it."""
    if (figure := figure_of(run, draw)) is not None:
        yield f"{name}.svg", svg(figure)
        yield f"{name}.csv", as_csv(numbers(name)(run))


def all_files_of(run: Run) -> Iterator[tuple[str, str]]:
    """Give the names and contents of the files of every picture."""
    for name, draw in gallery():
        yield from files_of(run, name, draw)


def save(run: Run, folder: Path) -> tuple[Path, ...]:
    """Draw every picture that applies to the run; the files written are given back."""
    written = []
    for name, content in all_files_of(run):
        written.append(folder / name)
        write_atomically(written[-1], content)
    return tuple(written)


def write(figure: Figure, path: Path, kind: str) -> Path:
    """Write one figure as one file."""
    write_atomically(path, drawn(figure, kind))
    return path


def png(figure: Figure) -> bytes:
    """Draw a figure as pixels."""
    with house_style():
        return drawn(figure, "png")


def svg(figure: Figure) -> str:
    """Draw a figure as text."""
    with house_style():
        return drawn(figure, "svg").decode()


def drawn(figure: Figure, kind: str) -> bytes:
    """Draw a figure as bytes; its places are found once for all kinds of files."""
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=METADATA[kind])
    return NO_XML.sub(b"?", buffer.getvalue()) if kind == "svg" else buffer.getvalue()
