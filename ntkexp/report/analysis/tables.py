"""The tables of a sweep, as three CSV files,
and the comparison of two sweeps run by run."""

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

# --- The tables of a sweep. A point is one combination of the swept values.
#
#     <name>.runs.csv     a row for each run: folder, point, seed, state, and all quantities
#     <name>.points.csv   a row for each point: mean, standard deviation, count and 95 % interval of
#                         every quantity
#     <name>.fits.csv     a row for each power law: exponent, interval, theory, curvature, fitted range


RUN_COLUMNS = ("run", "seed", "state", "reason")


@dataclass(frozen=True)
class Analysis:
    """The tables and laws of a sweep.

    `draws` describes what a seed draws at random: only weights, or also data.
    """

    sweep: Sweep
    runs: pd.DataFrame
    points: pd.DataFrame
    laws: tuple[Fitted, ...]
    draws: str

    @property
    def quantities(self) -> list[str]:
        """The names of the quantities of the runs."""
        return [
            str(name)
            for name in self.runs
            if name not in (*self.sweep.axes, *RUN_COLUMNS)
        ]

    @property
    def fits(self) -> pd.DataFrame:
        return pd.DataFrame([row_of(law) for law in self.laws])


def analyse(sweep: Sweep, runs: Mapping[Path, Run]) -> Analysis:
    """Compute the tables and laws of a sweep from its readable runs."""
    table = tabulate(sweep, runs)
    laws = [law for fit in sweep.fits for law in fitted(fit, table, sweep)]
    drawn = draws(runs[run.folder] for run in sweep.runs if run.folder in runs)
    return Analysis(sweep, table, points(sweep, table), tuple(laws), drawn)


def write_tables(path: Path) -> tuple[Path, ...]:
    """Read a sweep and its runs, and write the tables next to the file of the sweep.

    Return the paths of the tables.
    """
    sweep = read_sweep(path)
    # ignore the mistakes: the row of an unreadable run has no quantities
    runs, _ = load_runs_of(sweep)
    return save(analyse(sweep, runs), path.parent)


def load_runs_of(sweep: Sweep) -> tuple[dict[Path, Run], dict[Path, Mistake]]:
    """Return the readable runs of a sweep by folder, and a `Mistake` for each other
    folder."""
    folders = [run.folder for run in sweep.runs]
    runs = dict[Path, Run]()
    mistakes = dict[Path, Mistake]()
    for folder, run in zip(folders, load_runs(folders), strict=True):
        if isinstance(run, Mistake):
            mistakes[folder] = run
        else:
            runs[folder] = run
    return runs, mistakes


def draws(runs: Iterable[Run]) -> str:
    """Describe what the seeds of the runs draw at random:
    only weights, or weights and data."""
    return drawn_words(
        run.config.get("data", {}).get("seed") is not None for run in runs
    )


def drawn_words(fixed: Iterable[bool]) -> str:
    """Describe what seeds draw at random. `fixed` is True for each run whose data have
    a fixed seed.

    >>> drawn_words([True, True]), drawn_words([False])
    ('each drawing weights alone, on the same data', 'each drawing weights and data')
    """
    kinds = {*fixed}
    if kinds == {True}:
        return "each drawing weights alone, on the same data"
    if kinds == {False}:
        return "each drawing weights and data"
    return "each drawing weights, and in some runs data"


def save(analysis: Analysis, folder: Path) -> tuple[Path, ...]:
    tables = {"runs": analysis.runs, "points": analysis.points, "fits": analysis.fits}
    written = []
    for kind, table in tables.items():
        if len(table.columns):
            written.append(folder / f"{analysis.sweep.path.stem}.{kind}.csv")
            write_atomically(written[-1], format_csv(table))
    return tuple(written)


def tabulate(sweep: Sweep, runs: Mapping[Path, Run]) -> pd.DataFrame:
    """Return a row for each run. Missing quantities are NaN."""
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
    head = pd.DataFrame(heads, columns=["run", *sweep.axes, *RUN_COLUMNS[1:]])
    return pd.concat([head, pd.DataFrame(numbers, dtype=float)], axis=1)


def points(sweep: Sweep, table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each point of the sweep.

    The count of a quantity is the number of runs that have it.
    """
    names = [str(name) for name in table if name not in (*sweep.axes, *RUN_COLUMNS)]
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
                f"{name}.low": mean.low,
                f"{name}.high": mean.high,
            }
        rows.append(row)
    return pd.DataFrame(rows)


# --- Paired comparison of two sweeps. A pair is two runs with the same seed at the same
# point, with quantities a and b. Fluctuations that the runs of a pair share cancel.
#
#     difference   mean of b − a
#     ratio        exp of the mean of log b/a, if all numbers are positive
#
# Difference and ratio have intervals over seeds. The last row of each quantity is a
# summary over all points. The summary uses only the seeds that have a pair at every
# point. The pairs of one seed are not independent, so they are averaged first.


def compare(first: Analysis, second: Analysis) -> pd.DataFrame:
    """Compare two sweeps. Return, for each quantity, a row for each point that both
    sweeps have, and one row over all of these points."""
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
    except ValueError:  # the axis has texts in one sweep, and numbers in the other
        pairs = pd.DataFrame()
    if pairs.empty:
        raise Mistake(
            f"{first.sweep.name} and {second.sweep.name} share no seed at any point"
        )
    rows: list[dict[str, object]] = []
    for name in first.quantities:
        if name not in second.quantities:
            continue
        other = f"{name} of the second"
        complete = pairs[[*axes, "seed", name, other]].dropna(subset=[name, other])
        complete = complete.rename(columns={name: "first", other: "second"})
        points = complete.groupby(axes, sort=False, dropna=False)
        for point, here in points:
            place = dict(zip(axes, point, strict=True))
            row = {"quantity": name, **place, "pairs": len(here)}
            rows.append(row | average(here, range_of(name)))
        # summarise all points, with the seeds that have a pair at every point
        at_all = complete[
            complete.groupby("seed")["seed"].transform("count") == len(points)
        ]
        if len(points) > 1 and len(at_all):
            rows.append(
                {"quantity": name, "pairs": len(at_all)}
                | average(at_all, range_of(name))
            )
    return pd.DataFrame(rows)


def average(pairs: pd.DataFrame, within: Range) -> dict[str, float]:
    """Return the mean of the quantity in each sweep,
    and the mean paired difference and ratio.

    The ratio is the geometric mean. The difference and the ratio have intervals.
    """
    # the logarithms exist even if the ratio is too small or too large for a float
    numbers = pairs[["first", "second"]]
    logs_of_both = numbers.where(numbers > 0).map(math.log, na_action="ignore")
    logs = logs_of_both["second"] - logs_of_both["first"]
    differences = pairs["second"] - pairs["first"]
    per_seed = pairs.assign(difference=differences, log=logs).groupby("seed", sort=True)
    # if numbers are in [a, b], their differences are in [a − b, b − a]
    largest = within[1] - within[0]
    difference = mean_of(per_seed["difference"].mean().tolist(), (-largest, largest))
    ratio = Estimate(math.nan)
    if np.isfinite(logs).all():
        ratio = mean_of(per_seed["log"].mean().tolist())
    with np.errstate(over="ignore"):  # a ratio above the largest float is infinite
        ratios = np.exp([ratio.value, ratio.low, ratio.high]).tolist()
    return {
        "first": float(pairs["first"].mean()),
        "second": float(pairs["second"].mean()),
        "difference": difference.value,
        "difference_low": difference.low,
        "difference_high": difference.high,
        **dict(zip(("ratio", "ratio_low", "ratio_high"), ratios, strict=True)),
    }
