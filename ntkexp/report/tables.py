"""Tables of results, and one function for each output format.

One function creates the rows of each table: `sentence.tabulate_ladder`,
`explain.tabulate_examples`, `comparison.combined`, and so on. Rows contain numbers in
full precision. A column has a name, and a function that formats its values for a
terminal.

    format_text      aligned columns for a terminal
    format_markdown  Markdown
    format_csv       CSV of a data frame, with every digit
    json_rows        an object for each row, with every digit
    format_html      cells of a page, with values in full precision as sort keys

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
    """Format a value as text. Floats are rounded; whole numbers keep every digit."""
    if value is None or isinstance(value, float):
        return short(value)
    return str(value)


def format_signed(value: float) -> str:
    """Format a number with its sign.

    >>> format_signed(0.5), format_signed(-0.25), format_signed(0.0)
    ('+0.5', '-0.25', '0')
    """
    if value > 0:
        return f"+{short(value)}"
    return short(value + 0.0)


@dataclass(frozen=True)
class Column:
    """A column and its format on a terminal. Texts are shown unchanged,
    and None as a dash."""

    name: str
    number: bool = True  # True aligns the column to the right
    spell: Callable[[Any], str] = format_value  # formats the numbers
    heading: str | None = None  # heading on a terminal; the name if None
    adds: bool = False  # True if the sum of several rows has a meaning
    # if `adds` is False: the text in the row that replaces omitted rows
    others: str = ""


def text_column(name: str, heading: str | None = None) -> Column:
    return Column(name, number=False, heading=heading)


def signed_column(name: str) -> Column:
    """Return a column of signed numbers that add up, such as contributions."""
    return Column(name, spell=format_signed, adds=True)


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def select(self, *names: str) -> Table:
        """Return a table of the named columns, in this order."""
        places = {column.name: k for k, column in enumerate(self.columns)}
        chosen = [places[name] for name in names]
        rows = tuple(tuple(row[k] for k in chosen) for row in self.rows)
        return Table(tuple(self.columns[k] for k in chosen), rows)

    def shortened(self, top: int) -> Table:
        """Keep the first `top` rows, and replace all other rows by one row with sums.

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
        sums = [
            sum(values) if column.adds else column.others for column, values in columns
        ]
        last_row = (counted(len(others), "other"), *sums[1:])
        return replace(self, rows=(*self.rows[:top], last_row))


def tabulate(
    header: Sequence[str],
    rows: Iterable[Sequence[Value]],
    numbers: Collection[str] = (),
) -> Table:
    """Return a table with the column names `header`.

    Columns in `numbers` are aligned to the right.
    """
    columns = tuple(Column(name, number=name in numbers) for name in header)
    return Table(columns, tuple(map(tuple, rows)))


def table_of_frame(frame: pd.DataFrame) -> Table:
    columns = tuple(
        Column(str(name), dtype.kind in "biuf") for name, dtype in frame.dtypes.items()
    )
    values = (frame.iloc[:, k].tolist() for k in range(len(columns)))
    return Table(columns, tuple(zip(*values, strict=True)))


# --- Output formats.


def format_text(table: Table) -> str:
    header = [
        column.name if column.heading is None else column.heading
        for column in table.columns
    ]
    lines = [
        [
            spelled(column, value)
            for column, value in zip(table.columns, row, strict=True)
        ]
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
    """Format a table in Markdown, with numbers aligned to the right."""
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
        f"\\{letter}" if letter in r"\`*_{}[]<>|#" else letter
        for letter in text.replace("\n", " ")
    )


def format_csv(frame: pd.DataFrame) -> str:
    """Format a data frame as CSV in full precision.

    Escape texts that a spreadsheet would evaluate as formulas.

    >>> import pandas as pd
    >>> print(format_csv(pd.DataFrame({"name": ["=1+1", "a"], "value": [-0.5, 2.0]})), end="")
    name,value
    '=1+1,-0.5
    a,2.0
    """
    import numpy as np  # noqa: PLC0415  slow to import, and lists of runs do not need it

    safe = frame.copy(deep=False)
    for column, dtype in enumerate(frame.dtypes):
        if dtype.kind not in "biuf":
            cells = [
                as_cell(value) if isinstance(value, str) else value
                for value in frame.iloc[:, column]
            ]
            # put the cells into an array of objects, so that NumPy does not convert
            # them
            objects = np.array([*cells, None], dtype=object)[:-1]
            safe.isetitem(column, objects)
    safe.columns = [as_cell(str(name)) for name in frame.columns]
    return str(safe.to_csv(index=False, lineterminator="\n"))


def json_rows(table: Table) -> list[dict[str, Json]]:
    """Return a dictionary for each row. Blanks in column names become underscores."""
    keys = [column.name.replace(" ", "_") for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def format_json(value: Json) -> str:
    r"""Format JSON. Escape control characters, which a terminal would execute.

    >>> print(format_json({"a": "\x9b31m"}), end="")
    {
      "a": "\u009b31m"
    }
    """
    lines = to_text(value).split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(map(json_letter, line))
        for line in lines
    )


def json_letter(letter: str) -> str:
    if letter.isprintable() or letter in ODD_LETTERS:
        return letter
    return json.dumps(letter)[1:-1]


@dataclass(frozen=True)
class Cell:
    """A cell of an HTML table: text, sort key, and link."""

    text: str
    key: str
    link: str = ""


@dataclass(frozen=True)
class PageTable:
    """An HTML table. `name` is its anchor on the page."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def format_html(
    table: Table, name: str, caption: str, links: Sequence[str] = ()
) -> PageTable:
    """Return the cells for the HTML template.

    `links` are the links of the first cell of each row.
    """
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
