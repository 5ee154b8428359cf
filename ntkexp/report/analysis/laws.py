"""The power laws of a sweep: a quantity along one axis, for each choice of the others, beside the theory's exponent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ntkexp.mistake import Mistake
from ntkexp.records.fit import Fit
from ntkexp.records.sweep import Level, Sweep
from ntkexp.report.analysis.power_law import PowerLaw, power_law
from ntkexp.report.analysis.start_variance import NEEDS, dependence
from ntkexp.report.analysis.verdict import Verdict, judge
from ntkexp.report.quantity import START_VARIANCE, describe


@dataclass(frozen=True)
class Fitted:
    """A fit was made at one choice of the other axes: it has a law, or there is a reason why not."""

    fit: Fit
    others: Mapping[str, Level]
    law: PowerLaw | None
    reason: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The exponent stands so to theory's, where there is one."""
        expected = self.fit.expected
        return None if self.law is None or expected is None else judge(self.law.exponent, expected)


def fitted(fit: Fit, table: pd.DataFrame, sweep: Sweep) -> list[Fitted]:
    """Fit the law along one axis, for each choice of the others."""
    others = [key for key in sweep.axes if key != fit.axis]
    if fit.axis not in sweep.axes:
        return [Fitted(fit, {}, None, f"{fit.axis} is no axis of {sweep.name}")]
    groups = dict.fromkeys(tuple(place.axes[key] for key in others) for place in sweep.runs)
    found = []
    for group in groups:
        here = [tuple(place.axes[key] for key in others) == group for place in sweep.runs]
        chosen = dict(zip(others, group, strict=True))
        try:
            found.append(Fitted(fit, chosen, law_of(fit, table[here])))
        except Mistake as mistake:
            found.append(Fitted(fit, chosen, None, str(mistake)))
    return found


def law_of(fit: Fit, table: pd.DataFrame) -> PowerLaw:
    """Fit the law of a quantity along an axis of numbers."""
    describe(fit.quantity)
    levels = table[fit.axis].tolist()
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in levels):
        raise Mistake(f"{fit.axis} is no axis of numbers")
    if fit.quantity not in table:
        raise Mistake(f"no run yields {fit.quantity}{NEEDS if fit.quantity == START_VARIANCE else ''}")
    numbers = table[fit.quantity].to_numpy(dtype=float)
    law = power_law(np.array(levels, dtype=float), numbers, table["seed"].to_numpy(dtype=np.int64))
    return of_differences(law, table, fit) if fit.quantity == START_VARIANCE else law


def of_differences(law: PowerLaw, table: pd.DataFrame, fit: Fit) -> PowerLaw:
    """Count the seeds from which the first differences are taken, which have no number, and make up for what these
    have in common.
    """
    counts = table.groupby(fit.axis)[fit.quantity].count()
    points, seeds = int((counts > 0).sum()), min(law.seeds + 1, table["seed"].nunique())
    counted = replace(law, runs=law.runs + points, left_out=law.left_out - points, seeds=seeds)
    return counted.widened(dependence(int(counts[counts > 0].min()) + 1))


def row_of(found: Fitted) -> dict[str, Level]:
    """Write a law as a line of the table of laws."""
    fit, law, verdict = found.fit, found.law, found.verdict
    row: dict[str, Level] = {"quantity": fit.quantity, "axis": fit.axis, **found.others}
    if fit.expected is not None:
        row |= {"theory": fit.expected.value, "margin": fit.expected.margin, "bound": fit.expected.bound}
    if law is None:
        return row | {"note": found.reason}
    return row | {
        "exponent": law.exponent.value,
        "low": law.exponent.low,
        "high": law.exponent.high,
        "verdict": None if verdict is None else verdict.word,
        "more_seeds": None if verdict is None else verdict.more,
        "curvature": law.curvature.value,
        "curvature_low": law.curvature.low,
        "curvature_high": law.curvature.high,
        "curved": law.curved,
        "prefactor": law.prefactor,
        "from": law.start,
        "to": law.stop,
        "points": law.points,
        "runs": law.runs,
        "seeds": law.seeds,
        "left_out": law.left_out,
    }
