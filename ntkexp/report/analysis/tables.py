"""A sweep in numbers, as three files beside it, and two sweeps compared run by run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.sweep import Level, Sweep, read_sweep
from ntkexp.report.analysis.estimate import Estimate, Range, deviation, mean_of
from ntkexp.report.analysis.laws import Fitted, fitted, row_of
from ntkexp.report.analysis.quantities import quantities, range_of
from ntkexp.report.run import Run, load_runs
from ntkexp.report.tables import format_csv

# --- A sweep in numbers, as three files beside it.
#
# <name>.runs.csv     a row a run: its folder, point, seed and state, and every number it yields <name>.points.csv
# a row a point: mean, standard deviation, count and 95 % interval of every number over seeds <name>.fits.csv
# a row a fitted power law: exponent, its interval, the theory's, curvature, the range fitted


OF_A_RUN = ("run", "seed", "state", "reason")


@dataclass(frozen=True)
class Analysis:
    """The tables and laws of a sweep, and what a seed draws."""

    sweep: Sweep
    runs: pd.DataFrame
    points: pd.DataFrame
    laws: tuple[Fitted, ...]
    draws: str

    @property
    def quantities(self) -> list[str]:
        """The names of the numbers that any run yields."""
        return [str(name) for name in self.runs if name not in (*self.sweep.axes, *OF_A_RUN)]

    @property
    def fits(self) -> pd.DataFrame:
        return pd.DataFrame([row_of(law) for law in self.laws])


def analyse(sweep: Sweep, runs: Mapping[Path, Run]) -> Analysis:
    """Analyse a sweep, from those of its runs that could be read."""
    table = tabulate(sweep, runs)
    laws = tuple(law for fit in sweep.fits for law in fitted(fit, table, sweep))
    return Analysis(
        sweep,
        table,
        points(sweep, table),
        laws,
        draws(runs[p.folder] for p in sweep.runs if p.folder in runs),
    )


def write_tables(path: Path) -> tuple[Path, ...]:
    """Read the record of a sweep and its runs, and write the tables beside it; the files written are given back."""
    sweep = read_sweep(path)
    folders = [run.folder for run in sweep.runs]
    loaded = zip(
        folders, load_runs(folders), strict=True
    )  # of one that cannot be read, its row says what it became
    runs = {folder: run for folder, run in loaded if not isinstance(run, Mistake)}
    return save(analyse(sweep, runs), path.parent)


def draws(runs: Iterable[Run]) -> str:
    """Say what every seed of some runs draws, and so what intervals over seeds are about."""
    return drawn_words(run.config.get("data", {}).get("seed") is not None for run in runs)


def drawn_words(fixed: Iterable[bool]) -> str:
    """The same, of whether the data of runs have a seed of their own.

    >>> drawn_words([True, True]), drawn_words([False])
    ('each drawing weights alone, on the same data', 'each drawing weights and data')
    """
    of_runs = {*fixed}
    if of_runs == {True}:
        return "each drawing weights alone, on the same data"
    return (
        "each drawing weights and data"
        if of_runs == {False}
        else "each drawing weights, and in some runs data"
    )


def save(analysis: Analysis, folder: Path) -> tuple[Path, ...]:
    tables = {"runs": analysis.runs, "points": analysis.points, "fits": analysis.fits}
    written = []
    for kind, table in tables.items():
        if len(table.columns):
            written.append(folder / f"{analysis.sweep.path.stem}.{kind}.csv")
            write_atomically(written[-1], format_csv(table))
    return tuple(written)


def tabulate(sweep: Sweep, runs: Mapping[Path, Run]) -> pd.DataFrame:
    """Tabulate a row a run; numbers that a run does not yield are NaN."""
    heads = [
        {
            "run": run.folder.name,
            **run.axes,
            "seed": run.seed,
            "state": run.state,
            "reason": run.reason,
        }
        for run in sweep.runs
    ]
    folders = [run.folder for run in sweep.runs]
    numbers = [quantities(runs[folder]) if folder in runs else {} for folder in folders]
    names = list(dict.fromkeys(name for row in numbers for name in row))
    head = pd.DataFrame(heads, columns=["run", *sweep.axes, *OF_A_RUN[1:]])
    return pd.concat([head, pd.DataFrame(numbers, columns=names, dtype=float)], axis=1)


def points(sweep: Sweep, table: pd.DataFrame) -> pd.DataFrame:
    """Tabulate a row a point; the count is that of runs which yield the number."""
    names = [str(name) for name in table if name not in (*sweep.axes, *OF_A_RUN)]
    columns = {name: table[name].to_numpy(dtype=float) for name in names}
    rows = []
    for point in dict.fromkeys(run.point for run in sweep.runs):
        row: dict[str, Level] = dict(zip(sweep.axes, point, strict=True))
        here = np.array([run.point == point for run in sweep.runs])
        for name, column in columns.items():
            values = column[here & ~np.isnan(column)].tolist()
            mean = mean_of(values, range_of(name))
            row |= {
                f"{name}.mean": mean.value,
                f"{name}.sd": deviation(values),
                f"{name}.count": len(values),
            }
            row |= {f"{name}.low": mean.low, f"{name}.high": mean.high}
        rows.append(row)
    return pd.DataFrame(rows)


# --- Two sweeps compared run by run: runs of the same seed at the same point are a pair, and what they share cancels.
#
#     difference   mean of b − a                    ratio   exp of the mean of log b/a, where all are positive
#
# both with intervals over seeds. The last row of a quantity speaks of all points, by the seeds that have a pair
# at each: a seed's pairs are averaged first, because they are one draw, and means over other points are means of
# something else.


def compare(first: Analysis, second: Analysis) -> pd.DataFrame:
    """Tabulate a row for each quantity at each point that both sweeps hold, and one for all of them."""
    axes = list(first.sweep.axes)
    if set(axes) != set(second.sweep.axes):
        raise Mistake(
            f"{first.sweep.name} runs along {', '.join(axes)} and {second.sweep.name} along "
            f"{', '.join(second.sweep.axes)}; sweeps are compared along the same axes"
        )
    try:
        pairs = first.runs.merge(
            second.runs, on=[*axes, "seed"], suffixes=("", " of the second"), sort=False
        )
    except ValueError:  # one has words where the other has numbers
        pairs = pd.DataFrame()
    if pairs.empty:
        raise Mistake(f"{first.sweep.name} and {second.sweep.name} share no seed at any point")
    rows: list[dict[str, object]] = []
    for name in (name for name in first.quantities if name in second.quantities):
        complete = pairs[[*axes, "seed", name, f"{name} of the second"]].dropna(
            subset=[name, f"{name} of the second"]
        )
        complete = complete.rename(columns={name: "first", f"{name} of the second": "second"})
        points = complete.groupby(axes, sort=False, dropna=False)
        for point, here in points:
            place = dict(zip(axes, point, strict=True))
            rows.append(
                {"quantity": name, **place, "pairs": len(here)} | average(here, range_of(name))
            )
        whole = complete[complete.groupby("seed")["seed"].transform("count") == len(points)]
        if len(points) > 1 and len(whole):
            rows.append({"quantity": name, "pairs": len(whole)} | average(whole, range_of(name)))
    return pd.DataFrame(rows)


def average(pairs: pd.DataFrame, within: Range) -> dict[str, float]:
    """Average both sides of a quantity with this range, their difference and their ratio."""
    positive = (pairs["first"] > 0) & (pairs["second"] > 0)
    logs = (pairs["second"] / pairs["first"]).where(positive).map(math.log, na_action="ignore")
    per_seed = pairs.assign(difference=pairs["second"] - pairs["first"], log=logs).groupby(
        "seed", sort=True
    )
    # numbers between a and b differ by a − b to b − a
    farthest = within[1] - within[0]
    difference = mean_of(per_seed["difference"].mean().tolist(), (-farthest, farthest))
    ratio = (
        mean_of(per_seed["log"].mean().tolist()) if np.isfinite(logs).all() else Estimate(math.nan)
    )
    return {
        "first": float(pairs["first"].mean()),
        "second": float(pairs["second"].mean()),
        "difference": difference.value,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "ratio": math.exp(ratio.value),
        "ratio_low": math.exp(ratio.low),
        "ratio_high": math.exp(ratio.high),
    }
