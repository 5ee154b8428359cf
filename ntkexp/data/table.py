r"""Tables: a user's file (CSV or Parquet), and small data sets of the package.

sets/README.md lists the origins of the data sets. A cell is a text. The text may be a
number, or mark a missing value:

>>> parse_number("1e3"), parse_number("TRUE"), parse_number("1_000"), parse_number("inf")
(1000.0, 1.0, nan, nan)
>>> is_missing("N/A"), is_missing("none")
(True, False)

`foreign_format` recognises other formats by their first bytes, so that an error message
can name them:

>>> foreign_format(b"PK\x03\x04...")
'a ZIP archive (of Excel, NumPy or torch, perhaps)'
>>> foreign_format(b"size,price\n1,2\n")
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO, StringIO
from math import isfinite, isnan, nan
from pathlib import Path
from reprlib import repr as brief  # quoted, on one line, shortened if long
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import (
    AbstractSource,
    Examples,
    UserPath,
    one_line,
    quoted,
    read_contents,
    require_file,
)
from ntkexp.mistake import Mistake, nearest

# --- A table of text cells


@dataclass(frozen=True)
class Grid:
    """A table of text cells without surrounding blanks. A missing cell is empty."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    numbers: list[int]
    """The line or row number of each row, for messages."""
    unit: str
    """Unit of `numbers`: "line" of a text, or "row" of a Parquet file."""
    unlearned: Mapping[str, str] = field(default_factory=dict)
    """Names of columns that hold neither numbers nor text, and their types."""

    def location(self, row: int, column: str) -> str:
        """Return a description of a cell and its position, for messages."""
        cell = self.rows[row][self.columns.index(column)]
        row_number = f"{self.unit} {self.numbers[row]}"
        return (
            f"{self.path.name!r}, {row_number}, column {brief(column)} is {brief(cell)}"
        )

    def cells(self, column: str) -> list[str]:
        position = self.columns.index(column)
        return [row[position] for row in self.rows]

    def check(self, target: str) -> None:
        """Raise unless there are rows, distinct column names,
        the target column, and a feature."""
        if not self.rows:
            raise Mistake(f"{quoted(self.path)} has no rows below its header")
        if "" in self.columns:
            raise Mistake(
                f"{quoted(self.path)}: column {self.columns.index('') + 1} has no name; name it, or "
                "remove it if it only numbers the rows"
            )
        repeated = [name for name, count in Counter(self.columns).items() if count > 1]
        if repeated:
            raise Mistake(
                f"{quoted(self.path)} has more than one column {brief(repeated[0])}; give each a "
                "name of its own"
            )
        if target not in self.columns:
            hint = one_line(nearest(target, self.columns))
            raise Mistake(
                f"data.target={target!r}: {self.path.name!r} has no such column, only "
                f"{list_names(self.columns)}{hint}"
            )
        if target in self.unlearned:
            raise Mistake(
                f"data.target={target!r} is a column of type {one_line(self.unlearned[target])}; "
                "numbers, texts and truth values can be learned, so write it as one of these"
            )
        if len(self.columns) == 1:
            raise Mistake(
                f"{quoted(self.path)} has a single column, {brief(target)}, and no features"
            )


def list_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first `limit` names as text. If there are more, add their total.

    >>> list_names(["a", "b", "c"], limit=2)
    "'a', 'b', … (3 in all)"
    """
    names = list(names)
    shown = ", ".join(brief(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"


TRUTH = {"false": 0.0, "true": 1.0}
MISSING_CELLS = frozenset({"", "?", "na", "n/a", "<na>", "nan", "null"})


def parse_number(cell: str) -> float:
    """Return the number in a cell, or NaN. Infinity and 1_000 do not count
    as numbers."""
    text = cell.lower()
    if text in TRUTH:
        return TRUTH[text]
    try:
        value = float(text)
    except ValueError:
        return nan
    return value if isfinite(value) and "_" not in text else nan


def is_missing(cell: str) -> bool:
    return cell.lower() in MISSING_CELLS


FILE_KINDS = {
    rb"PK(?:\x03\x04|\x05\x06|\x07\x08)": "a ZIP archive (of Excel, NumPy or torch, perhaps)",
    rb"\x1f\x8b": "compressed by gzip",
    rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)": "compressed by bzip2",
    rb"\xfd7zXZ\0": "compressed by xz",
    rb"\x28\xb5\x2f\xfd": "compressed by zstd",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive",
    rb"PAR1[\0-\xff]*PAR1\Z": "a Parquet file",
    rb"ARROW1\0\0|FEA1[\0-\xff]*FEA1\Z": "an Arrow file",
    rb"\x89HDF\r\n\x1a\n": "an HDF5 file",
    rb"\x93NUMPY": "an array of NumPy",
    rb"\x80[\x02-\x05][\0-\xff]*\.\Z": "a pickle",
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a file of an old Excel",
    rb"SQLite format 3\0": "a database of SQLite",
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF[\0-\xff]{4}WEBP|II\*\0|MM\0\*|BM[\0-\xff]{4}\0\0\0\0": "an image",
    rb"%PDF-": "a PDF",
}
"""Formats that are not a text table, by a pattern of their first bytes. If a text could
begin with the same bytes, the pattern also contains the last bytes."""


def foreign_format(raw: bytes) -> str | None:
    """Return the name of a known binary format,
    or None for text and unknown formats."""
    return next(
        (kind for first, kind in FILE_KINDS.items() if re.match(first, raw)), None
    )


# --- Comma-separated text in UTF-8, with a header
#
# The number of a row is the line on which it begins; the header is line 1. A quoted
# cell may span several lines. Empty lines are ignored.


def read_comma(path: Path) -> Grid:
    reader = csv.reader(
        StringIO(read_text(path), newline=""), skipinitialspace=True, strict=True
    )
    line_numbers: list[int] = []
    rows: list[list[str]] = []
    line_number = 1
    try:
        for cells in reader:
            if cells:
                line_numbers.append(line_number)
                rows.append([cell.strip() for cell in cells])
            line_number = reader.line_num + 1
    except csv.Error as error:
        raise Mistake(
            f"{quoted(path)}, line {line_number}: {error}; is a quotation mark missing?"
        ) from error
    if not rows:
        raise Mistake(f"{quoted(path)} is empty")
    # Raise if the header has a single column that contains a different separator.
    header = tuple(rows[0])
    for separator in (";", "\t"):
        if len(header) == 1 and separator in header[0]:
            raise Mistake(
                f"{quoted(path)} separates its columns by {separator!r}; save it with commas"
            )
    for number, cells in zip(line_numbers, rows, strict=True):
        if len(cells) != len(header):
            raise Mistake(
                f"{quoted(path)}, line {number}: {len(cells)} cells, and the header has "
                f"{len(header)}"
            )
    return Grid(path, header, rows[1:], line_numbers[1:], "line")


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, with or without a byte order mark."""
    raw = read_contents(path)
    kind = foreign_format(raw)
    if kind:
        raise Mistake(
            f"{quoted(path)} is {kind}, whatever its name says; save the table as text with commas"
        )
    position = raw.find(b"\0")
    if position >= 0:
        line = raw.count(b"\n", 0, position) + 1
        raise Mistake(
            f"{quoted(path)}, line {line}: byte 0x00 cannot be in a text; save the table as text in UTF-8"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Mistake(
            f"{quoted(path)}, line {line}: byte {raw[error.start]:#04x} is not UTF-8; save the "
            "file as UTF-8"
        ) from error


# --- Parquet files, read by the optional dependency pyarrow; rows are counted from 1


def read_parquet(path: Path) -> Grid:
    raw = read_contents(path)
    try:
        pyarrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise Mistake(
            "reading Parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error
    try:
        table = parquet.ParquetFile(BytesIO(raw)).read()
        columns = [
            [cell_text(value) for value in column.to_pylist()]
            for column in table.columns
        ]
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise Mistake(
            f"{quoted(path)} is cut short or damaged: it is not a Parquet file that can be read"
        ) from error
    rows = [list(row) for row in zip(*columns, strict=True)]
    unlearned = {
        column.name: str(column.type)
        for column in table.schema
        if not is_learned(column.type, pyarrow.types)
    }
    row_numbers = list(range(1, len(rows) + 1))
    return Grid(path, tuple(table.column_names), rows, row_numbers, "row", unlearned)


def is_learned(kind: Any, types: Any) -> bool:
    """Return True if a Parquet column of this type holds numbers, texts or truth values,
    which may be dictionary-encoded."""
    if types.is_dictionary(kind):
        return is_learned(kind.value_type, types)
    text = (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
    )
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(text or number or types.is_boolean(kind) or types.is_null(kind))


def cell_text(value: object) -> str:
    """Convert a value to the text of a cell.

    >>> [cell_text(value) for value in (None, True, 0.1, " a ")]
    ['', 'true', '0.1', 'a']
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


# --- Features are numbers and truth values; other cells are missing values (gaps).


Missing = Literal["refuse", "drop", "mean"]


def read_features(grid: Grid, target: str) -> Float[Tensor, "row feature"]:
    """Return all columns except the target, with NaN for gaps.
    Raise if a column has only gaps."""
    names = [name for name in grid.columns if name != target]
    columns = [[parse_number(cell) for cell in grid.cells(name)] for name in names]
    values = torch.tensor(columns, dtype=torch.float64).t()
    empty = values.isnan().all(0)
    if empty.any():
        name = names[int(empty.nonzero()[0])]
        raise Mistake(
            f"{grid.location(0, name)}, and no other cell of {brief(name)} is a number either; remove "
            "the column, or write it as numbers or true and false"
        )
    return values.contiguous()


def usable_rows(
    values: Float[Tensor, "row feature"], grid: Grid, target: str, missing: Missing
) -> Bool[Tensor, " row"]:
    """Return a mask of the rows to use: rows without gaps,
    or all rows if gaps will be filled."""
    gaps = values.isnan()
    if missing == "refuse" and gaps.any():
        names = [name for name in grid.columns if name != target]
        row, column = gaps.nonzero()[0].tolist()
        raise Mistake(
            f"{grid.location(row, names[column])}, which is not a number; data.missing=drop leaves "
            "out the row, mean fills it"
        )
    usable = ~gaps.any(1) | (missing == "mean")
    if not usable.any():
        raise Mistake(
            f"data.missing=drop: every row of {grid.path.name!r} lacks a number; try "
            "data.missing=mean"
        )
    return usable


# --- Targets: classes or real numbers
#
# Texts, truth values, and up to 20 different integers are classes, in sorted order.
# Other numbers are real targets. Missing targets raise an error, and so do mixtures of
# numbers and texts. A replacement would be trained as if it were true.


MAX_CLASSES = 20
Name = TypeVar("Name", str, int)


def read_targets(grid: Grid, target: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return class labels and class names, or real values and ()."""
    cells = grid.cells(target)
    for row, cell in enumerate(cells):
        if is_missing(cell):
            raise Mistake(
                f"{grid.location(row, target)}: the target is missing; remove the row, or give its target"
            )
    if all(cell.lower() in TRUTH for cell in cells):
        return number_labels([cell.lower() for cell in cells])

    values = [parse_number(cell) for cell in cells]
    is_number = [not isnan(value) for value in values]
    if not any(is_number):
        different = len(set(cells))
        if different > MAX_CLASSES:
            raise Mistake(
                f"data.target={brief(target)} holds {different} different texts, and at most "
                f"{MAX_CLASSES} can be classes"
            )
        return number_labels(cells)

    # If numbers and texts are mixed, report the first cell of the rarer kind.
    numbers_are_rare = 2 * sum(is_number) < len(is_number)
    if not all(is_number):
        kinds = "no number, and most others are"
        if numbers_are_rare:
            kinds = "a number, and most others are not"
        first = is_number.index(numbers_are_rare)
        raise Mistake(
            f"{grid.location(first, target)}: the target is {kinds}; correct it or remove the row"
        )
    if all(value.is_integer() for value in values) and len(set(values)) <= MAX_CLASSES:
        return number_labels([int(value) for value in values])
    return torch.tensor(values, dtype=torch.float64)[:, None], ()


def number_labels(values: list[Name]) -> tuple[Tensor, tuple[str, ...]]:
    """Return the label of each value, and the sorted distinct values as class names."""
    names = sorted(set(values))
    label = {name: k for k, name in enumerate(names)}
    return torch.tensor([label[value] for value in values]), tuple(
        str(name) for name in names
    )


SETS = Path(__file__).resolve().parent / "sets"


def read_bundled(
    name: str,
) -> tuple[Float[Tensor, "example feature"], Float[Tensor, " example"]]:
    """Read the inputs and targets of a data set of the package."""
    numbers = torch.from_numpy(np.loadtxt(SETS / f"{name}.csv.gz", delimiter=","))
    return numbers[:, :-1], numbers[:, -1]


class Table(AbstractSource):
    """A user's table (CSV or Parquet), in which one column is the target
    and the others are features.

    Classification or regression, depending on the target column.

        ntkexp train data=table data.path=houses.csv data.target=price

    Features are numbers, or true and false. Other cells are gaps. With
    `missing=refuse`, a gap raises an error; with `drop`, the row is dropped; with
    `mean`, the gap is filled by the mean of the column over the training split. A gap
    in the target always raises.

    >>> inputs, target = read_bundled("wine")
    >>> inputs.shape, target.unique()
    (torch.Size([178, 13]), tensor([0., 1., 2.], dtype=torch.float64))
    """

    readers: ClassVar[dict[str, Callable[[Path], Grid]]] = {
        ".csv": read_comma,
        ".parquet": read_parquet,
    }

    path: UserPath
    target: str = Field(coerce_numbers_to_str=True)
    """Name of the target column. A name may be a number."""
    missing: Missing = "refuse"

    def files(self) -> tuple[Path, ...]:
        return (require_file(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        suffix = require_file(self.path).suffix.lower()
        if suffix not in self.readers:
            hint = "; data=arrays reads NPZ files" if suffix == ".npz" else ""
            raise Mistake(
                f"{quoted(self.path)} ends in {suffix!r}; a table ends in "
                f"{' or '.join(self.readers)}{hint}"
            )
        grid = self.readers[suffix](self.path)
        grid.check(self.target)
        target, classes = read_targets(grid, self.target)
        values = read_features(grid, self.target)
        keep = usable_rows(values, grid, self.target, self.missing)
        return Examples(
            values[keep], target[keep], classes, gaps=self.missing == "mean"
        )


class BreastCancer(AbstractSource):
    """Breast cancer Wisconsin (diagnostic): 30 measurements of cell nuclei
    in 569 tumours.

    Two classes, malignant and benign.
    """

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("breast_cancer")
        return Examples(inputs, target.long(), ("malignant", "benign"))


class Diabetes(AbstractSource):
    """Diabetes: ten measurements of 442 patients,
    and the progression of the disease after one year.

    Regression; the file contains the inputs in their original units, because the
    package standardises them."""

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("diabetes")
        return Examples(inputs, target[:, None])


class Wine(AbstractSource):
    """Wine recognition: 13 measurements of 178 wines from three cultivars.

    Three classes. The set is small, so the default splits are small too.
    """

    train: Count = 64
    query: CountOrNone = 32

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("wine")
        return Examples(inputs, target.long(), ("class_0", "class_1", "class_2"))
