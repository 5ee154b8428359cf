"""A table as the page shows it: a cell has a text, and a number or a word to be sorted by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ntkexp.report.table import written
from ntkexp.text import MISSING


@dataclass(frozen=True)
class Cell:
    """A cell is read so, is sorted by this, and leads there."""

    text: str
    key: str
    link: str = ""


@dataclass(frozen=True)
class Column:
    """A column has a heading."""

    name: str
    number: bool


@dataclass(frozen=True)
class Table:
    """A table has columns, rows, and a name that the page can link to."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def table(frame: pd.DataFrame, name: str, caption: str, links: Sequence[str] = ()) -> Table:
    """Show a data frame; the first cell of each row leads where `links` says."""
    numbers = [pd.api.types.is_numeric_dtype(frame[key]) for key in frame]
    rows = list(zip(*(frame[key].tolist() for key in frame), strict=True))
    return tabled(list(map(str, frame)), numbers, rows, name, caption, links)


def tabled(
    header: Sequence[str],
    numbers: Sequence[bool],
    rows: Iterable[Sequence[object]],
    name: str,
    caption: str,
    links: Sequence[str] = (),
) -> Table:
    """Show rows of values."""
    columns = tuple(map(Column, header, numbers))
    cells = [[cell(value) for value in row] for row in rows]
    for row, link in zip(cells, links, strict=False):
        row[0] = replace(row[0], link=link)
    return Table(name, caption, columns, tuple(map(tuple, cells)))


def cell(value: object) -> Cell:
    """Show one value: as many digits as mean something, sorted by all of them."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell(MISSING, "")
    return Cell(written(value), str(value))
