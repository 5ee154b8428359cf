"""A cell of the tables: what ours took, what each peer took in the same run, and what nothing could take less than."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench.machine import Machine
from tests.bench.stopwatch import milliseconds
from tests.bench.table import Table


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
