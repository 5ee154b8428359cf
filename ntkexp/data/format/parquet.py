"""Tables in Parquet files, read by pyarrow, which is an optional dependency. Rows are counted from 1."""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from ntkexp.data.format.grid import Grid
from ntkexp.data.format.user_path import contents, quoted
from ntkexp.mistake import Mistake


def read(path: Path) -> Grid:
    """Read the table in a file."""
    raw = contents(path)
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise Mistake("reading Parquet needs pyarrow, which is not installed: pip install pyarrow") from error
    try:
        table = parquet.ParquetFile(BytesIO(raw)).read()
        columns = [[cell(value) for value in column.to_pylist()] for column in table.columns]
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise Mistake(f"{quoted(path)} is cut short or damaged: it is no Parquet file that can be read") from error
    rows = [list(row) for row in zip(*columns, strict=True)]
    unlearned = {column.name: str(column.type) for column in table.schema if not is_learned(column.type, pyarrow.types)}
    return Grid(path, tuple(table.column_names), rows, list(range(1, len(rows) + 1)), "row", unlearned)


def is_learned(kind: Any, types: Any) -> bool:
    """Whether a type is one of numbers, texts or truth values; a dictionary is of what it stands for."""
    if types.is_dictionary(kind):
        return is_learned(kind.value_type, types)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(text or number or types.is_boolean(kind) or types.is_null(kind))


def cell(value: object) -> str:
    """A value as text would hold it.

    >>> [cell(value) for value in (None, True, 0.1, " a ")]
    ['', 'true', '0.1', 'a']
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
