r"""Tables: a file of the user's, as comma-separated text or Parquet, and the small data sets that come with the
package (their sources: sets/README.md).

What the text of a cell means.

>>> parse_number("1e3"), parse_number("TRUE"), parse_number("1_000"), parse_number("inf")
(1000.0, 1.0, nan, nan)
>>> is_missing("N/A"), is_missing("none")
(True, False)

What a file is by its first bytes, whatever its name says: of many formats, they are a text that is known.

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
from reprlib import repr as brief  # in quotes, on one line, shortened if it is long
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

# --- A table as text: named columns, rows of cells, and where in its file each row stands.


@dataclass(frozen=True)
class Grid:
    """Cells are text without blanks around it; a missing one is empty."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    numbers: list[int]  # of the rows, as a person counts them
    unit: str  # what is counted: lines of a text, rows of a Parquet file
    unlearned: Mapping[str, str] = field(
        default_factory=dict
    )  # columns of neither numbers nor texts, and their types

    def place(self, row: int, column: str) -> str:
        """The place of a cell in its file, and what it holds."""
        cell = self.rows[row][self.columns.index(column)]
        return f"{self.path.name!r}, {self.unit} {self.numbers[row]}, column {brief(column)} is {brief(cell)}"

    def cells(self, column: str) -> list[str]:
        position = self.columns.index(column)
        return [row[position] for row in self.rows]

    def check(self, target: str) -> None:
        """A table has rows, each column has a name of its own, and the target is one of several."""
        if not self.rows:
            raise Mistake(f"{quoted(self.path)} has no rows below its header")
        if "" in self.columns:
            raise Mistake(
                f"{quoted(self.path)}: column {self.columns.index('') + 1} has no name; name it, or remove it if it "
                "only numbers the rows"
            )
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice:
            raise Mistake(
                f"{quoted(self.path)} has more than one column {brief(twice[0])}; give each a name of its own"
            )
        if target not in self.columns:
            columns, hint = list_names(self.columns), one_line(nearest(target, self.columns))
            raise Mistake(
                f"data.target={target!r}: {self.path.name!r} has no such column, only {columns}{hint}"
            )
        if target in self.unlearned:
            raise Mistake(
                f"data.target={target!r} is a column of type {one_line(self.unlearned[target])}; numbers, texts and "
                "truth values can be learned, so write it as one of these"
            )
        if len(self.columns) == 1:
            raise Mistake(
                f"{quoted(self.path)} has a single column, {brief(target)}, so nothing to learn it from"
            )


def list_names(names: Iterable[str], most: int = 12) -> str:
    """The first names, and how many there are if these are not all.

    >>> list_names(["a", "b", "c"], most=2)
    "'a', 'b', … (3 in all)"
    """
    names = list(names)
    shown = ", ".join(brief(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"


TRUTH = {"false": 0.0, "true": 1.0}
MISSING = frozenset({"", "?", "na", "n/a", "<na>", "nan", "null"})


def parse_number(cell: str) -> float:
    """The number a cell holds, NaN if it holds none; infinity is none, and Python's 1_000 is text elsewhere."""
    word = cell.lower()
    if word in TRUTH:
        return TRUTH[word]
    try:
        value = float(word)
    except ValueError:
        return nan
    return value if isfinite(value) and "_" not in word else nan


def is_missing(cell: str) -> bool:
    return cell.lower() in MISSING


KINDS = {
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
"""First bytes, and last ones where a text could begin alike."""


def foreign_format(raw: bytes) -> str | None:
    """The format of another kind that these bytes are in; None for text, and for unknown formats."""
    return next((kind for first, kind in KINDS.items() if re.match(first, raw)), None)


# --- Tables as comma-separated text in UTF-8, with a header.
#
# Rows are numbered by the line on which they begin, the header being line 1, as editors do it; a cell in quotes
# may span several lines. Empty lines are passed over.


def read_comma(path: Path) -> Grid:
    # rows with the number of the line at which each begins, for messages
    reader = csv.reader(StringIO(read_text(path), newline=""), skipinitialspace=True, strict=True)
    numbers, lines, begins = [], [], 1
    try:
        for cells in reader:
            if cells:
                numbers.append(begins)
                lines.append([cell.strip() for cell in cells])
            begins = reader.line_num + 1
    except csv.Error as error:
        raise Mistake(
            f"{quoted(path)}, line {begins}: {error}; is a quotation mark missing?"
        ) from error
    if not lines:
        raise Mistake(f"{quoted(path)} is empty")
    # a header of one column that holds a separator is of another dialect
    header = tuple(lines[0])
    for separator in (";", "\t"):
        if len(header) == 1 and separator in header[0]:
            raise Mistake(
                f"{quoted(path)} separates its columns by {separator!r}; save it with commas"
            )
    for number, cells in zip(numbers, lines, strict=True):
        if len(cells) != len(header):
            raise Mistake(
                f"{quoted(path)}, line {number}: {len(cells)} cells, and the header has {len(header)}"
            )
    return Grid(path, header, lines[1:], numbers[1:], "line")


def read_text(path: Path) -> str:
    """Read the file as text; a byte order mark is not a part of the first name."""
    raw = read_contents(path)
    if kind := foreign_format(raw):
        raise Mistake(
            f"{quoted(path)} is {kind}, whatever its name says; save the table as text with commas"
        )
    if (position := raw.find(b"\0")) >= 0:
        line = raw.count(b"\n", 0, position) + 1
        raise Mistake(
            f"{quoted(path)}, line {line}: byte 0x00 is in no text; save the table as text in UTF-8"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Mistake(
            f"{quoted(path)}, line {line}: byte {raw[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from error


# --- Tables in Parquet files, read by pyarrow, which is an optional dependency. Rows are counted from 1.


def read_parquet(path: Path) -> Grid:
    raw = read_contents(path)
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise Mistake(
            "reading Parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error
    try:
        table = parquet.ParquetFile(BytesIO(raw)).read()
        columns = [[cell_text(value) for value in column.to_pylist()] for column in table.columns]
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
    return Grid(
        path, tuple(table.column_names), rows, list(range(1, len(rows) + 1)), "row", unlearned
    )


def is_learned(kind: Any, types: Any) -> bool:
    """Whether a type is one of numbers, texts or truth values; a dictionary is of what it stands for."""
    if types.is_dictionary(kind):
        return is_learned(kind.value_type, types)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(text or number or types.is_boolean(kind) or types.is_null(kind))


def cell_text(value: object) -> str:
    """A value as text would hold it.

    >>> [cell_text(value) for value in (None, True, 0.1, " a ")]
    ['', 'true', '0.1', 'a']
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


# --- The columns that are learned from: numbers, true or false. Anything else is a gap.
#
# A column without any number is text, and no way of filling gaps makes it a feature.


Missing = Literal["refuse", "drop", "mean"]


def read_features(grid: Grid, target: str) -> Float[Tensor, "row feature"]:
    """Put all columns but the target together, with NaN for a gap."""
    names = [name for name in grid.columns if name != target]
    values = torch.tensor(
        [[parse_number(c) for c in grid.cells(name)] for name in names], dtype=torch.float64
    ).t()
    empty = values.isnan().all(0)
    if empty.any():
        name = names[int(empty.nonzero()[0])]
        raise Mistake(
            f"{grid.place(0, name)}, and no other cell of {brief(name)} is a number either; remove the column, or "
            "write it as numbers or true and false"
        )
    return values.contiguous()


def usable_rows(
    values: Float[Tensor, "row feature"], grid: Grid, target: str, how: Missing
) -> Bool[Tensor, " row"]:
    """The rows to keep: those without a gap, or all of them if gaps are to be filled."""
    gaps = values.isnan()
    if how == "refuse" and gaps.any():
        names = [name for name in grid.columns if name != target]
        row, column = gaps.nonzero()[0].tolist()
        raise Mistake(
            f"{grid.place(row, names[column])}, which is not a number; data.missing=drop leaves out the row, "
            "mean fills it"
        )
    keep = ~gaps.any(1) | (how == "mean")
    if not keep.any():
        raise Mistake(
            f"data.missing=drop: every row of {grid.path.name!r} lacks a number; try data.missing=mean"
        )
    return keep


# --- The column that is learned: classes, or real numbers.
#
# Texts, truth values and at most 20 different whole numbers are classes, in sorted order; other numbers are real.
# A target that is missing, or of another kind than the rest, is refused: a guess at it would be learned as the
# truth.


MOST = 20
Name = TypeVar("Name", str, int)


def read_targets(grid: Grid, target: str) -> tuple[Tensor, tuple[str, ...]]:
    """Find labels and the names of their classes, or real values and no names."""
    cells = grid.cells(target)
    for row, cell in enumerate(cells):
        if is_missing(cell):
            raise Mistake(
                f"{grid.place(row, target)}: the target is missing; remove the row, or give its target"
            )
    if all(cell.lower() in TRUTH for cell in cells):
        return number_labels([cell.lower() for cell in cells])

    # Texts are classes, of which there cannot be many.
    values = [parse_number(cell) for cell in cells]
    numbers = [not isnan(value) for value in values]
    if not any(numbers):
        if (different := len(set(cells))) > MOST:
            raise Mistake(
                f"data.target={brief(target)} holds {different} different texts, and at most {MOST} can be classes"
            )
        return number_labels(cells)

    # A text is the mistake among numbers, a number among texts.
    rare = 2 * sum(numbers) < len(numbers)
    if not all(numbers):
        kinds = "a number, and most others are not" if rare else "no number, and most others are"
        raise Mistake(
            f"{grid.place(numbers.index(rare), target)}: the target is {kinds}; correct it or remove the row"
        )
    if all(value.is_integer() for value in values) and len(set(values)) <= MOST:
        return number_labels([int(value) for value in values])
    return torch.tensor(values, dtype=torch.float64)[:, None], ()


def number_labels(values: list[Name]) -> tuple[Tensor, tuple[str, ...]]:
    """Number each value by its position among the different ones."""
    names = sorted(set(values))
    position = {name: k for k, name in enumerate(names)}
    return torch.tensor([position[value] for value in values]), tuple(str(name) for name in names)


SETS = Path(__file__).resolve().parent / "sets"


def read_bundled(name: str) -> tuple[Float[Tensor, "example feature"], Float[Tensor, " example"]]:
    """Read all inputs and targets of a set by its name, in the order of its file."""
    numbers = torch.from_numpy(np.loadtxt(SETS / f"{name}.csv.gz", delimiter=","))
    return numbers[:, :-1], numbers[:, -1]


class Table(AbstractSource):
    """A table of the user's, as CSV or Parquet: one column is the target, all others are features.

    Classification or regression, as the target column has it.

        ntkexp train data=table data.path=houses.csv data.target=price

    Features are numbers, true or false. Where one is missing or something else, the row is refused, dropped, or filled
    with the mean of its column over the training split; the target is never guessed.

    Small data sets that come with the package; their sources stand beside them in sets/README.md.

    >>> inputs, target = read_bundled("wine")
    >>> inputs.shape, target.unique()
    (torch.Size([178, 13]), tensor([0., 1., 2.], dtype=torch.float64))
    """

    readers: ClassVar[dict[str, Callable[[Path], Grid]]] = {
        ".csv": read_comma,
        ".parquet": read_parquet,
    }

    path: UserPath
    target: str = Field(coerce_numbers_to_str=True)  # columns may be numbered
    missing: Missing = "refuse"

    def files(self) -> tuple[Path, ...]:
        return (require_file(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        ending = require_file(self.path).suffix.lower()
        if ending not in self.readers:
            raise Mistake(
                f"{quoted(self.path)} ends in {ending!r}; a table ends in {' or '.join(self.readers)}"
            )
        grid = self.readers[ending](self.path)
        grid.check(self.target)
        target, classes = read_targets(grid, self.target)
        values = read_features(grid, self.target)
        keep = usable_rows(values, grid, self.target, self.missing)
        return Examples(values[keep], target[keep], classes, gaps=self.missing == "mean")


class BreastCancer(AbstractSource):
    """Breast cancer Wisconsin (diagnostic): 30 measurements of cell nuclei in 569 tumours.

    Two classes, malignant and benign.
    """

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("breast_cancer")
        return Examples(inputs, target.long(), ("malignant", "benign"))


class Diabetes(AbstractSource):
    """Diabetes: ten measurements of 442 patients and how far the disease went in a year.

    Regression; the inputs are taken in their own units, because standardising is done here.
    """

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("diabetes")
        return Examples(inputs, target[:, None])


class Wine(AbstractSource):
    """Wine recognition: 13 measurements of 178 wines from three cultivars.

    Three classes; the set is small, and so are its splits.
    """

    train: Count = 64
    probe: CountOrNone = 32

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("wine")
        return Examples(inputs, target.long(), ("class_0", "class_1", "class_2"))
