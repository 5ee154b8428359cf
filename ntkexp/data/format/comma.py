"""Tables as comma-separated text in UTF-8, with a header.

Rows are numbered by the line on which they begin, the header being line 1, as editors do it; a cell in quotes may
span several lines. Empty lines are passed over.
"""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

from ntkexp.data.format.grid import Grid
from ntkexp.data.format.other_formats import foreign
from ntkexp.data.format.user_path import contents, quoted
from ntkexp.mistake import Mistake


def read(path: Path) -> Grid:
    """Read the table in a file."""
    numbers, lines = numbered(path, text(path))
    if not lines:
        raise Mistake(f"{quoted(path)} is empty")
    header = tuple(lines[0])
    for separator in (";", "\t"):
        if len(header) == 1 and separator in header[0]:
            raise Mistake(f"{quoted(path)} separates its columns by {separator!r}; save it with commas")
    for number, cells in zip(numbers, lines, strict=True):
        if len(cells) != len(header):
            raise Mistake(f"{quoted(path)}, line {number}: {len(cells)} cells, and the header has {len(header)}")
    return Grid(path, header, lines[1:], numbers[1:], "line")


def text(path: Path) -> str:
    """Read the file as text; a byte order mark is no part of the first name."""
    raw = contents(path)
    if kind := foreign(raw):
        raise Mistake(f"{quoted(path)} is {kind}, whatever its name says; save the table as text with commas")
    if (place := raw.find(b"\0")) >= 0:
        line = raw.count(b"\n", 0, place) + 1
        raise Mistake(f"{quoted(path)}, line {line}: byte 0x00 is in no text; save the table as text in UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Mistake(
            f"{quoted(path)}, line {line}: byte {raw[error.start]:#04x} is no UTF-8; save the file as UTF-8"
        ) from error


def numbered(path: Path, whole: str) -> tuple[list[int], list[list[str]]]:
    """The lines that hold cells, with the number of the line on which each begins."""
    reader = csv.reader(StringIO(whole, newline=""), skipinitialspace=True, strict=True)
    numbers, lines, begins = [], [], 1
    try:
        for cells in reader:
            if cells:
                numbers.append(begins)
                lines.append([cell.strip() for cell in cells])
            begins = reader.line_num + 1
    except csv.Error as error:
        raise Mistake(f"{quoted(path)}, line {begins}: {error}; is a quotation mark missing?") from error
    return numbers, lines
