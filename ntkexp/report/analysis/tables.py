"""A sweep in numbers, as three files beside it.

<name>.runs.csv     a row a run: its folder, point, seed and state, and every number it yields
<name>.points.csv   a row a point: mean, standard deviation, count and 95 % interval of every number over seeds
<name>.fits.csv     a row a fitted power law: exponent, its interval, the theory's, curvature, the range fitted
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.sweep import Level, Sweep, read_sweep
from ntkexp.report.analysis.estimate import Estimate, deviation, mean_of
from ntkexp.report.analysis.laws import Fitted, fitted, row_of
from ntkexp.report.analysis.start_variance import start_variances
from ntkexp.report.quantity import START_VARIANCE, quantities
from ntkexp.report.run import Run, load_tables
from ntkexp.report.table import as_csv

OF_A_RUN = ("run", "seed", "state", "reason")


@dataclass(frozen=True)
class Analysis:
    """A sweep has these tables and laws, and a seed draws this."""

    sweep: Sweep
    runs: pd.DataFrame
    points: pd.DataFrame
    laws: tuple[Fitted, ...]
    draws: str

    @property
    def quantities(self) -> list[str]:
        """Numbers that any run yields have these names."""
        return [str(name) for name in self.runs if name not in (*self.sweep.axes, *OF_A_RUN)]

    @property
    def fits(self) -> pd.DataFrame:
        """The laws stand in a table."""
        return pd.DataFrame([row_of(law) for law in self.laws])


def analyse(sweep: Sweep, runs: Mapping[Path, Run]) -> Analysis:
    """Analyse a sweep, from those of its runs that could be read."""
    table = tabulate(sweep, runs)
    laws = tuple(law for fit in sweep.fits for law in fitted(fit, table, sweep))
    return Analysis(
        sweep, table, points(sweep, table), laws, draws(runs[p.folder] for p in sweep.runs if p.folder in runs)
    )


def write_tables(path: Path) -> tuple[Path, ...]:
    """Read the record of a sweep and its runs, and write the tables beside it; the files written are given back."""
    sweep, runs = read_sweep(path), {}
    for place in sweep.runs:
        try:
            runs[place.folder] = load_tables(place.folder)
        except Mistake:
            continue  # the run's own row says what became of it
    return save(analyse(sweep, runs), path.parent)


def draws(runs: Iterable[Run]) -> str:
    """Say what every seed draws, and so what intervals over seeds are about."""
    own = {run.config.get("data", {}).get("seed") is not None for run in runs}
    if own == {True}:
        return "each drawing weights alone, on the same data"
    return "each drawing weights and data" if own == {False} else "each drawing weights, and in some runs data"


def save(analysis: Analysis, folder: Path) -> tuple[Path, ...]:
    """Write the tables as files."""
    tables = {"runs": analysis.runs, "points": analysis.points, "fits": analysis.fits}
    written = []
    for kind, table in tables.items():
        if len(table.columns):
            written.append(folder / f"{analysis.sweep.path.stem}.{kind}.csv")
            write_atomically(written[-1], as_csv(table))
    return tuple(written)


def tabulate(sweep: Sweep, runs: Mapping[Path, Run]) -> pd.DataFrame:
    """Tabulate a row a run; numbers that a run does not yield are NaN."""
    heads = [
        {"run": place.folder.name, **place.axes, "seed": place.seed, "state": place.state, "reason": place.reason}
        for place in sweep.runs
    ]
    asked = any(fit.quantity == START_VARIANCE for fit in sweep.fits)
    starts = start_variances(sweep, runs) if asked else {}  # kernels are opened for nothing else
    folders = [place.folder for place in sweep.runs]
    numbers = [quantities(runs[place]) | starts.get(place, {}) if place in runs else {} for place in folders]
    names = list(dict.fromkeys(name for found in numbers for name in found))
    head = pd.DataFrame(heads, columns=["run", *sweep.axes, *OF_A_RUN[1:]])
    return pd.concat([head, pd.DataFrame(numbers, columns=names, dtype=float)], axis=1)


def points(sweep: Sweep, table: pd.DataFrame) -> pd.DataFrame:
    """Tabulate a row a point; the count is that of runs which yield the number."""
    names = [str(name) for name in table if name not in (*sweep.axes, *OF_A_RUN)]
    columns = {name: table[name].to_numpy(dtype=float) for name in names}
    rows = []
    for point in dict.fromkeys(place.point for place in sweep.runs):
        row: dict[str, Level] = dict(zip(sweep.axes, point, strict=True))
        here = np.array([place.point == point for place in sweep.runs])
        for name, column in columns.items():
            values = column[here & ~np.isnan(column)].tolist()
            # A mean of a few squares is too skewed for Student's interval, by as much as nobody knows: it has none.
            mean = Estimate(mean_of(values).value) if name == START_VARIANCE else mean_of(values)
            row |= {f"{name}.mean": mean.value, f"{name}.sd": deviation(values), f"{name}.count": len(values)}
            row |= {f"{name}.low": mean.low, f"{name}.high": mean.high}
        rows.append(row)
    return pd.DataFrame(rows)
