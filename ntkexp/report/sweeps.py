"""A sweep as a reader sees it: how far its axes go, its laws and the means at its points, in few columns."""

from __future__ import annotations

import pandas as pd

from ntkexp.records.sweep import Sweep
from ntkexp.report.analysis.laws import allowed
from ntkexp.report.analysis.tables import Analysis
from ntkexp.report.run import describe

TELLING = ("drift", "weights_moved", "loss")
JUDGED = ("exponent", "low", "high", "theory", "verdict", "more_seeds", "curved")


def extent(sweep: Sweep) -> str:
    """Say how far the axes of a sweep go.

    >>> from pathlib import Path
    >>> axes = {"model.width": (128, 32, 64)}
    >>> extent(Sweep(path=Path(), name="width", command="", axes=axes, seeds=(), base=(), fits=(), runs=()))
    'model.width 3 values from 32 to 128'
    """
    parts = []
    for key, values in sweep.axes.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) < max(3, len(values)):
            parts.append(f"{key} {', '.join(map(str, values))}")
        else:
            parts.append(f"{key} {len(values)} values from {min(numbers)} to {max(numbers)}")
    seeds, done = len({place.seed for place in sweep.runs}), sum(place.state == "done" for place in sweep.runs)
    missing = [f"{done} of {len(sweep.runs)} runs done"] if done < len(sweep.runs) else []
    return "; ".join([*parts, *([f"{seeds} seeds"] if seeds > 1 else []), *missing])


def tabulate_fits(analysis: Analysis) -> pd.DataFrame:
    """Give the laws, each number in words, with the name to be used in commands."""
    found, words = analysis.fits.assign(theory=pd.Series(map(allowed, analysis.laws), dtype=object)), []
    for name in map(str, found["quantity"]):
        try:
            words.append(f"{describe(name)} [{name}]")
        except ValueError:  # a number that this version does not know
            words.append(name)
    columns = ("quantity", *analysis.sweep.axes, *JUDGED, "axis", "from", "to", "points", "seeds", "left_out")
    return found[[column for column in columns if column in found]].assign(quantity=words)


def tabulate_points(analysis: Analysis) -> pd.DataFrame:
    """Give the means that tell most, each with half its interval's width, and of how many runs; the CSV has all."""
    table, split = analysis.points, "probe" if any(q.endswith(".probe") for q in analysis.quantities) else "test"
    chosen = [q for q in analysis.quantities if q in TELLING or q.endswith(f".{split}")]
    found = table[list(analysis.sweep.axes)].copy()
    counts = table[[f"{name}.count" for name in chosen]].to_numpy(dtype=int).tolist()
    ranges = [(min(row, default=0), max(row, default=0)) for row in counts]  # which need not be as many for each
    found["runs"] = [str(low) if low == high else f"{low} to {high}" for low, high in ranges]
    for name in chosen:
        found[name] = table[f"{name}.mean"]
        if table[f"{name}.low"].notna().any():
            found[f"± {name}"] = (table[f"{name}.high"] - table[f"{name}.low"]) / 2
    return found
