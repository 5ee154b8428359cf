"""Tables of results, and one function for each form of a table.

One function makes the rows of each table: `sentence.tabulate_ladder`, `explain.tabulate_examples`,
`comparison.combined`, and so on. A row holds values with every digit. A column holds a name, and the function that
spells its values on a terminal.

    format_text      aligned columns for a terminal
    format_markdown  Markdown
    format_csv       CSV of a data frame, with every digit
    json_rows        an object for each row, with every digit
    format_html      cells of a page, sorted by every digit of their values

>>> found = tabulate(("machine", "error"), [("secant", 4.2e-15), ("left", None)], numbers={"error"})
>>> print(format_text(found))
machine  error
secant   4e-15
left         –
>>> json_rows(found)[0]
{'machine': 'secant', 'error': 4.2e-15}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ntkexp.records.atomic import Json, to_text
from ntkexp.text import MISSING, ODD_LETTERS, aligned, as_cell, counted, short

if TYPE_CHECKING:
    import pandas as pd

Value: TypeAlias = bool | int | float | str | None


def format_value(value: object) -> str:
    """Spell a value for a person. Whole numbers keep every digit."""
    if value is None or isinstance(value, float):
        return short(value)
    return str(value)


def format_signed(value: float) -> str:
    """Spell a number with its sign.

    >>> format_signed(0.5), format_signed(-0.25), format_signed(0.0)
    ('+0.5', '-0.25', '0')
    """
    if value > 0:
        return f"+{short(value)}"
    return short(value + 0.0)


@dataclass(frozen=True)
class Column:
    """A column, and how a terminal shows it. Texts are shown unchanged, and None as a dash."""

    name: str
    number: bool = True  # numbers are aligned to the right
    spell: Callable[[Any], str] = format_value
    heading: str | None = None  # on a terminal; the name if None
    adds: bool = False  # whether a sum of several rows has a meaning
    others: str = ""  # the cell of several rows, if they do not add up


def text_column(name: str, heading: str | None = None) -> Column:
    return Column(name, number=False, heading=heading)


def signed_column(name: str) -> Column:
    """Return a column of signed parts, which add up."""
    return Column(name, spell=format_signed, adds=True)


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def select(self, *names: str) -> Table:
        """Return these columns, in this order."""
        places = {column.name: k for k, column in enumerate(self.columns)}
        chosen = [places[name] for name in names]
        rows = tuple(tuple(row[k] for k in chosen) for row in self.rows)
        return Table(tuple(self.columns[k] for k in chosen), rows)

    def shortened(self, top: int) -> Table:
        """Return the first `top` rows, and one row for the sum of the others.

        >>> columns = Column("example", number=False), Column("added", adds=True)
        >>> Table(columns, (("a", 3.0), ("b", 2.0), ("c", -1.0))).shortened(1).rows
        (('a', 3.0), ('2 others', 1.0))
        """
        others = self.rows[top:]
        if not others:
            return self
        columns: Iterable[tuple[Column, Any]] = zip(
            self.columns, zip(*others, strict=True), strict=True
        )
        sums = [sum(values) if column.adds else column.others for column, values in columns]
        last_row = (counted(len(others), "other"), *sums[1:])
        return replace(self, rows=(*self.rows[:top], last_row))


def tabulate(
    header: Sequence[str], rows: Iterable[Sequence[Value]], numbers: Collection[str] = ()
) -> Table:
    """Return a table with these headings. The columns named in `numbers` hold numbers."""
    columns = tuple(Column(name, number=name in numbers) for name in header)
    return Table(columns, tuple(map(tuple, rows)))


def table_of_frame(frame: pd.DataFrame) -> Table:
    """Return the rows of a data frame as a table."""
    numeric = [dtype.kind in "biuf" for dtype in frame.dtypes]
    columns = tuple(
        Column(str(name), number) for name, number in zip(frame.columns, numeric, strict=True)
    )
    values = (frame.iloc[:, k].tolist() for k in range(len(columns)))
    return Table(columns, tuple(zip(*values, strict=True)))


# --- The forms of a table.


def format_text(table: Table) -> str:
    header = [column.name if column.heading is None else column.heading for column in table.columns]
    lines = [
        [spelled(column, value) for column, value in zip(table.columns, row, strict=True)]
        for row in table.rows
    ]
    return aligned(header, lines, [column.number for column in table.columns])


def spelled(column: Column, value: Value) -> str:
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    return column.spell(value)


def format_markdown(table: Table) -> str:
    """Write the table between bars, with numbers aligned to the right."""
    header = [column.name for column in table.columns]
    rows = [header, *([format_value(value) for value in row] for row in table.rows)]
    lines = ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in rows]
    rules = ["---:" if column.number else "---" for column in table.columns]
    return "\n".join([lines[0], f"| {' | '.join(rules)} |", *lines[1:]])


def escaped(text: str) -> str:
    r"""Escape text for Markdown.

    >>> print(escaped("a|b <c> x_1"))
    a\|b \<c\> x\_1
    """
    return "".join(
        f"\\{letter}" if letter in r"\`*_{}[]<>|#" else letter for letter in text.replace("\n", " ")
    )


def format_csv(frame: pd.DataFrame) -> str:
    """Write a data frame with every digit. Escape texts that a spreadsheet would take for formulas.

    >>> import pandas as pd
    >>> print(format_csv(pd.DataFrame({"name": ["=1+1", "a"], "value": [-0.5, 2.0]})), end="")
    name,value
    '=1+1,-0.5
    a,2.0
    """
    import numpy as np  # noqa: PLC0415  slow, and lists of runs need none

    safe = frame.copy(deep=False)
    for column, dtype in enumerate(frame.dtypes):
        if dtype.kind not in "biuf":
            cells = [
                as_cell(value) if isinstance(value, str) else value
                for value in frame.iloc[:, column]
            ]
            # an array of objects, so that NumPy converts no cell
            objects = np.array([*cells, None], dtype=object)[:-1]
            safe.isetitem(column, objects)
    safe.columns = [as_cell(str(name)) for name in frame.columns]
    return str(safe.to_csv(index=False, lineterminator="\n"))


def json_rows(table: Table) -> list[dict[str, Json]]:
    """Return an object for each row. Blanks in the names of columns become underscores."""
    keys = [column.name.replace(" ", "_") for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def format_json(value: Json) -> str:
    r"""Write JSON, with the characters on which a terminal acts as escape sequences.

    >>> print(format_json({"a": "\x9b31m"}), end="")
    {
      "a": "\u009b31m"
    }
    """
    lines = to_text(value).split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(map(json_letter, line)) for line in lines
    )


def json_letter(letter: str) -> str:
    if letter.isprintable() or letter in ODD_LETTERS:
        return letter
    return json.dumps(letter)[1:-1]


@dataclass(frozen=True)
class Cell:
    """A cell of a page: its text, its sort key, and its link."""

    text: str
    key: str
    link: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table of a page, with the name for links."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def format_html(table: Table, name: str, caption: str, links: Sequence[str] = ()) -> PageTable:
    """Return the cells that the page's template writes. `links` are the links of the first cells."""
    rows = []
    for k, row in enumerate(table.rows):
        cells = [html_cell(value) for value in row]
        if k < len(links):
            cells[0] = replace(cells[0], link=links[k])
        rows.append(tuple(cells))
    return PageTable(name, caption, table.columns, tuple(rows))


def html_cell(value: Value) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell(MISSING, "")
    return Cell(format_value(value), str(value))
