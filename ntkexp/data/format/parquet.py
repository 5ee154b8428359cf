"""Tables in Parquet files, read by pyarrow, which is an optional dependency. Rows are counted from 1."""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from pathlib import Path

from ntkexp.data.format.grid import Grid
from ntkexp.data.format.place import contents, given
from ntkexp.mistake import Mistake


def read(path: Path) -> Grid:
    """The table in a file."""
    raw = contents(path)
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise Mistake("reading Parquet needs pyarrow, which is not installed: pip install pyarrow") from error
    try:
        table = parquet.ParquetFile(BytesIO(raw)).read()
        columns = [[cell(value) for value in column.to_pylist()] for column in table.columns]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Mistake(f"{given(path)} is cut short or damaged: it is no Parquet file that can be read") from error
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Grid(path, tuple(table.column_names), rows, list(range(1, len(rows) + 1)), "row")


def cell(value: object) -> str:
    """A value as text would hold it.

    >>> [cell(value) for value in (None, True, 0.1, " a ")]
    ['', 'true', '0.1', 'a']
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
