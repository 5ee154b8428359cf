"""Tables of results, and the one function that writes a table in each form.

Whatever is shown of runs is made into rows in one place: the ladder (`sentence.tabulate_ladder`), the parts of a
prediction (`explain.tabulate_examples`), a removal (`ledger`), runs side by side (`run.combined`), and so on. A value
stands in a row with every digit; its column says what it is called and how it is spelled on a terminal. Then

    format_text      aligns columns for a terminal
    format_markdown  puts them between bars
    format_csv       writes every digit of a data frame
    json_rows        gives an object for each row, with every digit
    format_html      gives the cells of the page, each sorted by every digit of its value

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
    """Write a value for a person; whole numbers keep every digit."""
    return short(value) if value is None or isinstance(value, float) else str(value)


def format_signed(value: float) -> str:
    """Spell a number with its sign.

    >>> format_signed(0.5), format_signed(-0.25), format_signed(0.0)
    ('+0.5', '-0.25', '0')
    """
    return f"+{short(value)}" if value > 0 else short(value + 0.0)


@dataclass(frozen=True)
class Column:
    """A column, and how a terminal shows it: texts stand as they are, and what is unknown is a dash."""

    name: str
    number: bool = True  # numbers are set to the right
    spell: Callable[[Any], str] = format_value
    heading: str | None = None  # on a terminal, where that is not its name
    adds: bool = False  # whether the values of several rows add up to something
    others: str = ""  # what stands for several rows otherwise


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def select(self, *names: str) -> Table:
        """These columns, in this order."""
        columns = {column.name: k for k, column in enumerate(self.columns)}
        chosen = [columns[name] for name in names]
        rows = tuple(tuple(row[k] for k in chosen) for row in self.rows)
        return Table(tuple(self.columns[k] for k in chosen), rows)

    def shortened(self, top: int) -> Table:
        """The first rows, and one for what all others come to.

        >>> columns = Column("example", number=False), Column("added", adds=True)
        >>> Table(columns, (("a", 3.0), ("b", 2.0), ("c", -1.0))).shortened(1).rows
        (('a', 3.0), ('2 others', 1.0))
        """
        rest = self.rows[top:]
        if not rest:
            return self
        columns: Iterable[tuple[Column, Any]] = zip(
            self.columns, zip(*rest, strict=True), strict=True
        )
        sums = [sum(values) if column.adds else column.others for column, values in columns]
        return replace(self, rows=(*self.rows[:top], (counted(len(rest), "other"), *sums[1:])))


def tabulate(
    header: Sequence[str], rows: Iterable[Sequence[Value]], numbers: Collection[str] = ()
) -> Table:
    """Rows under headings, some of which are those of numbers."""
    columns = tuple(Column(name, number=name in numbers) for name in header)
    return Table(columns, tuple(map(tuple, rows)))


def table_of_frame(frame: pd.DataFrame) -> Table:
    """The table that a data frame holds."""
    numeric = [kind.kind in "biuf" for kind in frame.dtypes]
    columns = tuple(
        Column(str(name), number) for name, number in zip(frame.columns, numeric, strict=True)
    )
    return Table(
        columns, tuple(zip(*(frame.iloc[:, k].tolist() for k in range(len(columns))), strict=True))
    )


# --- The forms in which a table is written.


def format_text(table: Table) -> str:
    header = [column.name if column.heading is None else column.heading for column in table.columns]
    cells = [
        [
            MISSING if value is None else value if isinstance(value, str) else column.spell(value)
            for column, value in zip(table.columns, row, strict=True)
        ]
        for row in table.rows
    ]
    return aligned(header, cells, [column.number for column in table.columns])


def format_markdown(table: Table) -> str:
    """Write the table between bars, numbers to the right."""
    header = [column.name for column in table.columns]
    lines = [header, *([format_value(value) for value in row] for row in table.rows)]
    bars = ["| " + " | ".join(escaped(cell) for cell in line) + " |" for line in lines]
    rules = ["---:" if column.number else "---" for column in table.columns]
    return "\n".join([bars[0], f"| {' | '.join(rules)} |", *bars[1:]])


def escaped(text: str) -> str:
    r"""Write text so that Markdown reads it as text.

    >>> print(escaped("a|b <c> x_1"))
    a\|b \<c\> x\_1
    """
    return "".join(
        f"\\{letter}" if letter in r"\`*_{}[]<>|#" else letter for letter in text.replace("\n", " ")
    )


def format_csv(frame: pd.DataFrame) -> str:
    """Write a data frame with every digit, in which no text is a formula to a spreadsheet.

    >>> import pandas as pd
    >>> print(format_csv(pd.DataFrame({"name": ["=1+1", "a"], "value": [-0.5, 2.0]})), end="")
    name,value
    '=1+1,-0.5
    a,2.0
    """
    import numpy as np  # noqa: PLC0415  slow, and lists of runs need none

    safe = frame.copy(deep=False)
    for column, kind in enumerate(frame.dtypes):
        if kind.kind not in "biuf":
            cells = [
                as_cell(value) if isinstance(value, str) else value
                for value in frame.iloc[:, column]
            ]
            safe.isetitem(
                column, np.array([*cells, None], dtype=object)[:-1]
            )  # as they are: of one type or several
    safe.columns = [as_cell(str(name)) for name in frame.columns]
    return str(safe.to_csv(index=False, lineterminator="\n"))


def json_rows(table: Table) -> list[dict[str, Json]]:
    """Give an object for each row; blanks in the names of columns become underscores."""
    keys = [column.name.replace(" ", "_") for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def format_json(value: Json) -> str:
    r"""Write JSON for a terminal or a program: characters on which a terminal acts are spelled as JSON does.

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
    return letter if letter.isprintable() or letter in ODD_LETTERS else json.dumps(letter)[1:-1]


@dataclass(frozen=True)
class Cell:
    """A cell of the page is read so, is sorted by this, and leads there."""

    text: str
    key: str
    link: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table as the page shows it, with a name that can be linked to."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def format_html(table: Table, name: str, caption: str, links: Sequence[str] = ()) -> PageTable:
    """Give the cells of the page, which its template puts between tags; a row's first cell leads where `links` says."""
    rows = []
    for k, row in enumerate(table.rows):
        unknown = [
            value is None or (isinstance(value, float) and math.isnan(value)) for value in row
        ]
        cells = [
            Cell(MISSING, "") if gap else Cell(format_value(value), str(value))
            for value, gap in zip(row, unknown, strict=True)
        ]
        if k < len(links):
            cells[0] = replace(cells[0], link=links[k])
        rows.append(tuple(cells))
    return PageTable(name, caption, table.columns, tuple(rows))
