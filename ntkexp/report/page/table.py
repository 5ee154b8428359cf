"""A table as the page shows it: a cell has a text, and a number or a word to be sorted by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ntkexp.report.table import written


@dataclass(frozen=True)
class Cell:
    """What is read, what it is sorted by, and where it leads."""

    text: str
    key: str
    link: str = ""


@dataclass(frozen=True)
class Column:
    """A heading."""

    name: str
    number: bool


@dataclass(frozen=True)
class Table:
    """Columns and rows with a name that the page can link to."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def table(frame: pd.DataFrame, name: str, caption: str, links: Mapping[str, str] | None = None) -> Table:
    """A data frame; cells of its first column lead where `links` says."""
    columns = tuple(Column(str(key), pd.api.types.is_numeric_dtype(frame[key])) for key in frame)
    rows = tuple(
        tuple(cell(value, (links or {}).get(str(value), "") if k == 0 else "") for k, value in enumerate(row))
        for row in frame.astype(object).where(frame.notna(), None).itertuples(index=False)
    )
    return Table(name, caption, columns, rows)


def cell(value: object, link: str) -> Cell:
    """One value: as many digits as mean something, sorted by all of them."""
    return Cell(written(value), "" if value is None else str(value), link)
