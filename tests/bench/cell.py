"""Medians of alternating measurements, the tables and cells that they make, and figures that were kept under a name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch

Act: TypeAlias = Callable[[], object]


def medians(acts: Mapping[str, Act], times: int, within: float = inf) -> dict[str, float]:
    """The median seconds of each act; they take turns, after one round that does not count. No round begins after that
    many seconds, but for the first.
    """
    for act in acts.values():
        act()
    end, rounds = time.perf_counter() + within, [{name: seconds(act) for name, act in acts.items()}]
    while len(rounds) < times and time.perf_counter() < end:
        rounds.append({name: seconds(act) for name, act in acts.items()})
    return {name: median(each[name] for each in rounds) for name in acts}


def seconds(act: Act) -> float:
    """How long it takes once."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def milliseconds(value: float) -> str:
    """As many digits as mean something.

    >>> milliseconds(0.00123456), milliseconds(12.3456)
    ('1.23', '12346')
    """
    return f"{1000 * value:.3g}" if value < 1 else f"{1000 * value:.0f}"


# A table: as text for people, and as data for programs.


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


# What this machine does at its best, measured in the run in which it is compared with: products and copies.


SIZE = 1024  # of the matrices that are multiplied
COPIED = 4_000_000  # numbers that are copied: more than caches hold
QUICK = 64  # the size of both, where it is only asked whether all runs


@dataclass(frozen=True)
class Machine:
    """Rates of float64: operations (a multiplication and an addition are two) and bytes per second."""

    product: float  # seconds of a product of two square matrices
    operations: float
    bytes: float

    def floor(self, operations: float, numbers: float) -> float:
        """Seconds that nothing can beat that multiplies so often, and reads or writes so many numbers.

        >>> Machine(product=1.0, operations=100.0, bytes=80.0).floor(operations=200.0, numbers=30.0)
        3.0
        """
        return max(operations / self.operations, 8 * numbers / self.bytes)


def measure(*, quick: bool) -> Machine:
    """The machine with the threads that torch has now."""
    size, copied, times = (QUICK, QUICK, 1) if quick else (SIZE, COPIED, 9)
    square, long = (torch.randn(size, size, dtype=torch.float64), torch.randn(copied, dtype=torch.float64))
    into = torch.empty_like(long)
    found = medians({"product": lambda: torch.mm(square, square), "copy": lambda: into.copy_(long)}, times)
    return Machine(found["product"], 2 * size**3 / found["product"], 2 * 8 * copied / found["copy"])


# A cell of the tables: what ours took, what each peer took in the same run, and what nothing could take less than.


@dataclass(frozen=True)
class Cell:
    """Median seconds; `floor` is missing where nobody counted operations."""

    name: str
    seconds: float
    peers: Mapping[str, float] = field(default_factory=dict)
    floor: float | None = None
    failed: Mapping[str, str] = field(default_factory=dict)  # peers without a figure, and why
    others: Mapping[str, float] = field(default_factory=dict)  # ways of ours that are slower

    @property
    def gain(self) -> float | None:
        """How much longer the fastest peer takes.

        >>> Cell("a kernel", 2.0, {"one": 5.0, "other": 3.0}).gain
        1.5
        """
        return min(self.peers.values()) / self.seconds if self.peers else None

    @property
    def share(self) -> float | None:
        """How near the floor is: 1 would be on it."""
        return None if self.floor is None else self.floor / self.seconds


def shown(title: str, cells: Sequence[Cell], machine: Machine) -> Table:
    """A table, a row for each cell; `products` are how many plain products of matrices a cell takes as long as."""
    others = list(dict.fromkeys(name for cell in cells for name in cell.others))
    peers = list(dict.fromkeys(name for cell in cells for name in (*cell.peers, *cell.failed)))
    header = (
        "cell",
        "ours ms",
        *(f"{name} ms" for name in (*others, *peers)),
        "gain",
        "inverse",
        "floor ms",
        "of floor",
        "products",
    )
    rows = [row(cell, others, peers, machine) for cell in cells]
    used = [column for column in range(len(header)) if any(each[column] for each in rows)]
    return Table(title, [header[column] for column in used], [[each[column] for column in used] for each in rows])


def row(cell: Cell, others: Sequence[str], peers: Sequence[str], machine: Machine) -> list[str]:
    """One cell."""
    more = [milliseconds(cell.others[name]) if name in cell.others else "" for name in others]
    theirs = [milliseconds(cell.peers[name]) if name in cell.peers else cell.failed.get(name, "") for name in peers]
    gain = ("", "") if cell.gain is None else (f"{cell.gain:.3g}", f"{1 / cell.gain:.3g}")
    floor = ("", "") if cell.floor is None else (milliseconds(cell.floor), f"{cell.share:.0%}")
    return [
        cell.name,
        milliseconds(cell.seconds),
        *more,
        *theirs,
        *gain,
        *floor,
        f"{cell.seconds / machine.product:.3g}",
    ]


def as_json(cells: Sequence[Cell], machine: Machine) -> list[dict[str, Any]]:
    """The same as data."""
    more = ({"gain": cell.gain, "share": cell.share, "products": cell.seconds / machine.product} for cell in cells)
    return [asdict(cell) | rest for cell, rest in zip(cells, more, strict=True)]


# Figures that were kept under a name, as times of a plain product of matrices in the run that measured them.


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


def compared(found: Sequence[Compared], cells: int, threads: int) -> str:
    """What is slower than it was, what is faster, and of what nothing is known; below a row for each cell.

    >>> print(compared([Compared("a", "May", 1.0, 1.5), Compared("b", "May", 2.0, 1.0)], cells=3, threads=1), end="")
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
