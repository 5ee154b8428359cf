"""Medians of alternating measurements, and the tables and cells of the bench."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median
from typing import Any, TypeAlias

import torch

Act: TypeAlias = Callable[[], object]


def medians(acts: Mapping[str, Act], times: int, within: float = inf) -> dict[str, float]:
    """Return the median seconds of each act. The acts take turns, after one warm-up round. No round except the first
    begins later than `within` seconds.
    """
    for act in acts.values():
        act()
    end, rounds = time.perf_counter() + within, [{name: seconds(act) for name, act in acts.items()}]
    while len(rounds) < times and time.perf_counter() < end:
        rounds.append({name: seconds(act) for name, act in acts.items()})
    return {name: median(each[name] for each in rounds) for name in acts}


def seconds(act: Act) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def milliseconds(value: float) -> str:
    """Spell seconds as milliseconds, with three digits.

    >>> milliseconds(0.00123456), milliseconds(12.3456)
    ('1.23', '12346')
    """
    return f"{1000 * value:.3g}" if value < 1 else f"{1000 * value:.0f}"


# Tables, as text and as data.


@dataclass(frozen=True)
class Table:
    """Printed cells under a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """The table, aligned to the right.

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
        """The table as JSON, with numbers as numbers.

        >>> Table("Speeds", ["of", "ms"], [["MLP", "0.25"]]).data
        {'title': 'Speeds', 'header': ['of', 'ms'], 'rows': [['MLP', 0.25]]}
        """
        return {"title": self.title, "header": list(self.header), "rows": [[*map(value, row)] for row in self.rows]}


def value(cell: str) -> float | str | None:
    """Return the number in a cell, its text, or None if it is empty.

    >>> [value(cell) for cell in ("8", "1e-3", "", "nan", ".98±.01")]
    [8.0, 0.001, None, None, '.98±.01']
    """
    if cell in ("", "nan"):
        return None
    try:
        return float(cell)
    except ValueError:
        return cell


# The best rates of this machine, for products and copies, measured in the same run.


SIZE = 1024  # of the multiplied matrices
COPIED = 4_000_000  # numbers, more than the caches hold
QUICK = 64  # for both, with --quick


@dataclass(frozen=True)
class Machine:
    """Rates of float64: operations (a multiplication and an addition are two) and bytes per second."""

    product: float  # seconds of a product of two square matrices
    operations: float
    bytes: float

    def floor(self, operations: float, numbers: float) -> float:
        """Return the least seconds for these operations and for reading or writing these numbers.

        >>> Machine(product=1.0, operations=100.0, bytes=80.0).floor(operations=200.0, numbers=30.0)
        3.0
        """
        return max(operations / self.operations, 8 * numbers / self.bytes)


def measure(*, quick: bool) -> Machine:
    """Measure the machine with the current number of torch threads."""
    size, copied, times = (QUICK, QUICK, 1) if quick else (SIZE, COPIED, 9)
    square, long = (torch.randn(size, size, dtype=torch.float64), torch.randn(copied, dtype=torch.float64))
    into = torch.empty_like(long)
    found = medians({"product": lambda: torch.mm(square, square), "copy": lambda: into.copy_(long)}, times)
    return Machine(found["product"], 2 * size**3 / found["product"], 2 * 8 * copied / found["copy"])


# A cell: our time, the time of each other program in the same run, and the lower bound.


@dataclass(frozen=True)
class Cell:
    """Median seconds. `floor` is None if operations were not counted."""

    name: str
    seconds: float
    peers: Mapping[str, float] = field(default_factory=dict)
    floor: float | None = None
    failed: Mapping[str, str] = field(default_factory=dict)  # peers without a figure, and why
    others: Mapping[str, float] = field(default_factory=dict)  # slower ways of ntkexp

    @property
    def gain(self) -> float | None:
        """The time of the fastest peer, relative to ours.

        >>> Cell("a kernel", 2.0, {"one": 5.0, "other": 3.0}).gain
        1.5
        """
        return min(self.peers.values()) / self.seconds if self.peers else None

    @property
    def share(self) -> float | None:
        """The floor, relative to our time."""
        return None if self.floor is None else self.floor / self.seconds


def shown(title: str, cells: Sequence[Cell], machine: Machine) -> Table:
    """Return a table with a row for each cell. `products` is its time relative to one product of matrices."""
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
    """Return the row of a cell."""
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
    """Return the cells as data."""
    more = ({"gain": cell.gain, "share": cell.share, "products": cell.seconds / machine.product} for cell in cells)
    return [asdict(cell) | rest for cell, rest in zip(cells, more, strict=True)]
