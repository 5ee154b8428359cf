"""What was measured for one look at a claim: a table with a row for each run, or for each row of a trial.

runs    the name of the runs among those of the claim; of a trial: `trial`
run     the folder of the run            seed, and the axes of the runs, and every number that a run yields
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ntkexp.report.run import Run

HEAD = ("runs", "run", "seed", "state", "reason")


@dataclass(frozen=True)
class Measured:
    """The table, the runs behind it that could be read, by the names of their folders, and what a seed draws."""

    table: pd.DataFrame
    known: Mapping[str, Run]
    axes: tuple[str, ...] = ()
    draws: str = ""

    @property
    def numbers(self) -> list[str]:
        """Columns that hold numbers which were measured."""
        names = [str(name) for name in self.table if name not in (*HEAD, *self.axes)]
        return [name for name in names if pd.api.types.is_numeric_dtype(self.table[name])]

    def run(self, name: str) -> Run | None:
        """Find a run by its folder's name; None if it is not finished."""
        return self.known.get(name)

    def by_run(self, measure: Callable[[Run], Mapping[str, float]], names: Sequence[str]) -> pd.DataFrame:
        """Measure each run; a row for each of these numbers, told apart by the column `quantity`, NaN of no run."""
        runs = [self.run(name) for name in self.table["run"]]
        found = [dict.fromkeys(names, math.nan) if run is None else measure(run) for run in runs]
        parts = [self.table.assign(quantity=name, value=[row[name] for row in found]) for name in names]
        return pd.concat(parts, ignore_index=True)
