"""Figures that were kept under a name, as times of a plain product of matrices in the run that measured them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.cell import Table

FILE = Path(__file__).with_name("figures.json")
HEADER = ("cell", "tag", "tagged", "now", "ratio")
NOTABLE = 1.1  # a ratio that is more than the noise of an idle machine


@dataclass(frozen=True)
class Compared:
    """A cell beside its tagged figure, both in products of matrices."""

    name: str
    tag: str
    tagged: float
    now: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes now."""
        return self.now / self.tagged

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        return [self.name, self.tag, f"{self.tagged:.3g}", f"{self.now:.3g}", f"{self.ratio:.2f}"]


def kept(file: Path = FILE) -> dict[str, dict[str, dict[str, Any]]]:
    """By number of threads and cell: the tag, and the figure."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def keep(cells: Sequence[Mapping[str, Any]], threads: int, tag: str, file: Path = FILE) -> None:
    """Keep the figures of these cells; those of others stay, under the tags that they have."""
    known = kept(file)
    now = {cell["name"]: {"tag": tag, "products": float(f"{cell['products']:.4g}")} for cell in cells}
    known[str(threads)] = known.get(str(threads), {}) | now
    file.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def beside(cells: Sequence[Mapping[str, Any]], threads: int, file: Path = FILE) -> list[Compared]:
    """The cells of which there is a figure with as many threads."""
    tagged = kept(file).get(str(threads), {})
    return [
        Compared(cell["name"], before["tag"], before["products"], cell["products"])
        for cell in cells
        if (before := tagged.get(cell["name"]))
    ]


def shown(found: Sequence[Compared], cells: int, threads: int) -> str:
    """What is slower than it was, what is faster, and of what nothing is known; below a row for each cell.

    >>> print(shown([Compared("a", "May", 1.0, 1.5), Compared("b", "May", 2.0, 1.0)], cells=3, threads=1), end="")
    In products of matrices, beside tagged figures
      cell  tag  tagged  now  ratio
         a  May       1  1.5   1.50
         b  May       2    1   0.50
    1 of 2 takes more than 1.1 times as long: a 1.50; 1 less than 1/1.1: b 0.50. No figure of 1 thread is tagged for 1.
    """
    if not found:
        return (
            f"Of none of {cells} cells a figure of {counted(threads)} is tagged: --tag=NAME keeps those of this run\n"
        )
    slower = sorted((each for each in found if each.ratio > NOTABLE), key=lambda each: -each.ratio)
    faster = sorted((each for each in found if each.ratio < 1 / NOTABLE), key=lambda each: each.ratio)
    said = f"{len(slower)} of {len(found)} {'takes' if len(slower) == 1 else 'take'} more than {NOTABLE} times as long"
    said += f"{named(slower)}; {len(faster)} less than 1/{NOTABLE}{named(faster)}."
    if left := cells - len(found):
        said += f" No figure of {counted(threads)} is tagged for {left}."
    table = Table("In products of matrices, beside tagged figures", HEADER, [each.cells for each in found])
    return f"{table.text}{said}\n"


def named(found: Sequence[Compared]) -> str:
    """The cells and their ratios."""
    return ": " + "; ".join(f"{each.name} {each.ratio:.2f}" for each in found) if found else ""


def counted(threads: int) -> str:
    """How many threads.

    >>> counted(1), counted(2)
    ('1 thread', '2 threads')
    """
    return f"{threads} thread{'' if threads == 1 else 's'}"
