"""timings.csv: the seconds of each part of a run, `what,seconds`; the machines of the ladder are `machine.NAME`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from ntkexp.records.atomic import write_atomically

MACHINE = "machine."


def write_timings(path: Path, seconds: Mapping[str, float]) -> None:
    """Write the whole table, or nothing."""
    write_atomically(path, "what,seconds\n" + "".join(f"{what},{value:.6f}\n" for what, value in seconds.items()))


def read_timings(path: Path) -> dict[str, float]:
    """Seconds by what they were spent on; nothing where the clock was not kept."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["what"]: float(row["seconds"]) for row in csv.DictReader(file)}


def of_machines(seconds: Mapping[str, float]) -> dict[str, float]:
    """Take the part of the ladder, by machine.

    >>> of_machines({"run": 2.0, "machine.left": 0.5})
    {'left': 0.5}
    """
    return {what.removeprefix(MACHINE): value for what, value in seconds.items() if what.startswith(MACHINE)}
