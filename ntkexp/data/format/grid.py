"""A table as text: named columns, rows of cells, and where in its file each row stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief  # in quotes, on one line, shortened if it is long

from ntkexp.data.format.user_path import one_line, quoted
from ntkexp.mistake import Mistake, nearest


@dataclass(frozen=True)
class Grid:
    """Cells are text without blanks around it; a missing one is empty."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    numbers: list[int]  # of the rows, as a person counts them
    unit: str  # what is counted: lines of a text, rows of a Parquet file
    unlearned: Mapping[str, str] = field(default_factory=dict)  # columns of neither numbers nor texts, and their types

    def place(self, row: int, column: str) -> str:
        """The place of a cell in its file, and what it holds."""
        cell = self.rows[row][self.columns.index(column)]
        return f"{self.path.name!r}, {self.unit} {self.numbers[row]}, column {brief(column)} is {brief(cell)}"

    def cells(self, column: str) -> list[str]:
        """Read a column, from top to bottom."""
        position = self.columns.index(column)
        return [row[position] for row in self.rows]

    def check(self) -> None:
        """A table has rows, and each column has a name of its own."""
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

    def check_target(self, target: str) -> None:
        """The target is a column, and not the only one."""
        if target not in self.columns:
            hint = nearest(target, self.columns)
            known = listed(self.columns)
            raise Mistake(
                f"data.target={target!r}: {self.path.name!r} has no such column, only {known}{one_line(hint)}"
            )
        if target in self.unlearned:
            raise Mistake(
                f"data.target={target!r} is a column of type {one_line(self.unlearned[target])}; numbers, texts and "
                "truth values can be learned, so write it as one of these"
            )
        if len(self.columns) == 1:
            raise Mistake(f"{quoted(self.path)} has a single column, {brief(target)}, so nothing to learn it from")


def listed(names: Iterable[str], most: int = 12) -> str:
    """The first names, and how many there are if these are not all.

    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b', … (3 in all)"
    """
    names = list(names)
    shown = ", ".join(brief(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"
