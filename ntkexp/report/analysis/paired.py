"""Two sweeps compared run by run: runs of the same seed at the same point are a pair, and what they share cancels.

    difference   mean of b − a                    ratio   exp of the mean of log b/a, where all are positive

both with intervals over seeds. The last row of a quantity speaks of all points, by the seeds that have a pair at each:
a seed's pairs are averaged first, because they are one draw, and means over other points are means of something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import Estimate, mean_of
from ntkexp.report.analysis.tables import Analysis


def compare(first: Analysis, second: Analysis) -> pd.DataFrame:
    """Tabulate a row for each quantity at each point that both sweeps hold, and one for all of them."""
    axes = list(first.sweep.axes)
    if set(axes) != set(second.sweep.axes):
        raise Mistake(
            f"{first.sweep.name} runs along {', '.join(axes)} and {second.sweep.name} along "
            f"{', '.join(second.sweep.axes)}; sweeps are compared along the same axes"
        )
    pairs = first.runs.merge(second.runs, on=[*axes, "seed"], suffixes=("", " of the second"), sort=False)
    if pairs.empty:
        raise Mistake(f"{first.sweep.name} and {second.sweep.name} share no seed at any point")
    shared = [name for name in first.quantities if name in second.quantities]
    return pd.DataFrame([row for name in shared for row in rows(pairs, axes, name)])


def rows(pairs: pd.DataFrame, axes: Sequence[str], name: str) -> list[dict[str, object]]:
    """Compare one quantity, point by point and over all."""
    known = pairs[[*axes, "seed", name, f"{name} of the second"]].dropna(subset=[name, f"{name} of the second"])
    known = known.rename(columns={name: "first", f"{name} of the second": "second"})
    found = []
    for point, here in known.groupby(list(axes), sort=False, dropna=False):
        levels = dict(zip(axes, point, strict=True))
        found.append({"quantity": name, **levels, "pairs": len(here)} | measured(here))
    whole = known[known.groupby("seed")["seed"].transform("count") == len(found)]
    both = [{"quantity": name, "pairs": len(whole)} | measured(whole)] if len(found) > 1 and len(whole) else []
    return [*found, *both]


def measured(pairs: pd.DataFrame) -> dict[str, float]:
    """Average both sides, their difference and their ratio."""
    per_seed = pairs.assign(difference=pairs["second"] - pairs["first"], log=logs(pairs)).groupby("seed", sort=True)
    difference = mean_of(per_seed["difference"].mean().tolist())
    ratio = mean_of(per_seed["log"].mean().tolist()) if np.isfinite(logs(pairs)).all() else Estimate(math.nan)
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


def logs(pairs: pd.DataFrame) -> pd.Series[float]:
    """Take log b/a, NaN where one of them is not positive."""
    positive = (pairs["first"] > 0) & (pairs["second"] > 0)
    logarithms: pd.Series[float] = (pairs["second"] / pairs["first"]).where(positive).map(math.log, na_action="ignore")
    return logarithms
