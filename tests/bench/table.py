"""A table: as text for people, and as data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Cells as they are printed, under a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """Aligned to the right.

        >>> print(Table("Speeds", ["w", "ms"], [["8", "0.25"]]).text, end="")
        Speeds
          w    ms
          8  0.25
        """
        if not self.rows:
            return f"{self.title}\n  nothing is measured yet\n"
        lines = [self.header, *self.rows]
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.header))]
        text = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.title, *(f"  {line}" for line in text)]) + "\n"

    @property
    def data(self) -> dict[str, Any]:
        """Cells that are numbers are numbers.

        >>> Table("Speeds", ["of", "ms"], [["MLP", "0.25"]]).data
        {'title': 'Speeds', 'header': ['of', 'ms'], 'rows': [['MLP', 0.25]]}
        """
        return {"title": self.title, "header": list(self.header), "rows": [[*map(value, row)] for row in self.rows]}


def value(cell: str) -> float | str | None:
    """A number where the cell is one, nothing where it is empty.

    >>> [value(cell) for cell in ("8", "1e-3", "", "nan", ".98±.01")]
    [8.0, 0.001, None, None, '.98±.01']
    """
    if cell in ("", "nan"):
        return None
    try:
        return float(cell)
    except ValueError:
        return cell
