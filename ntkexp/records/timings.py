"""timings.csv: the seconds of each part of a run, `what,seconds,processor`; machines of the ladder are `machine.NAME`.

`seconds` passed on the wall, and `processor` are those of the work itself: empty where nobody counted them, as in files
that are older than the column. What a run took before it was resumed is its part `earlier`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ntkexp.records.atomic import write_atomically

MACHINE = "machine."


@dataclass(frozen=True)
class Took:
    """Something took so many seconds; of the processor they are NaN where nobody counted them."""

    wall: float
    processor: float = math.nan

    def __add__(self, other: Took) -> Took:
        return Took(self.wall + other.wall, self.processor + other.processor)

    @property
    def cells(self) -> str:
        """Both numbers as they are written."""
        return f"{self.wall:.6f}," + ("" if math.isnan(self.processor) else f"{self.processor:.6f}")


def write_timings(path: Path, parts: Mapping[str, Took]) -> None:
    """Write the whole table, or nothing."""
    rows = "".join(f"{what},{took.cells}\n" for what, took in parts.items())
    write_atomically(path, f"what,seconds,processor\n{rows}")


def read_timings(path: Path) -> dict[str, Took]:
    """Read what each part took; nothing where the clock was not kept."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["what"]: Took(float(row["seconds"]), float(row.get("processor") or "nan")) for row in rows}


def took(path: Path) -> Took:
    """Add up what all parts took; machines of the ladder are in them already."""
    parts = [took for what, took in read_timings(path).items() if not what.startswith(MACHINE)]
    return sum(parts, start=Took(0.0, 0.0)) if parts else Took(math.nan)


def of_machines(parts: Mapping[str, Took]) -> dict[str, float]:
    """Take the seconds of the ladder, by machine.

    >>> of_machines({"run": Took(2.0), "machine.left": Took(0.5)})
    {'left': 0.5}
    """
    return {what.removeprefix(MACHINE): took.wall for what, took in parts.items() if what.startswith(MACHINE)}
