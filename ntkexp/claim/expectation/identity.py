"""Identity: every error lies under its bound, the row's own where the table has a column `bound`.

One row beyond refutes it: this is no matter of chance, and the interval reaches from the best seed to the worst.

>>> table = pd.DataFrame({"seed": [0, 1], "value": [3e-15, 4e-15], "bound": [1e-12, 1e-12]})
>>> Identity().judge(table).verdict, Identity().judge(table.assign(bound=1e-16)).verdict
('supported', 'refuted')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation.base import SEEDS, AbstractExpectation
from ntkexp.claim.finding import Finding, Word
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ZERO = 1e-18
"""Errors below are drawn here: zero has no logarithm."""


class Identity(AbstractExpectation):
    """Errors are at most `tolerance`, or what their rows say is explained by rounding, if that is more."""

    tolerance: float = Field(1e-12, gt=0)

    @property
    def words(self) -> str:
        return f"every error ≤ {short(self.tolerance)}, or its row's rounding"

    @property
    def places(self) -> tuple[float, ...]:
        """Chance has no part in it, so there is no edge at which it is undecided."""
        return (-1.0, 1.0)

    def decide(self, table: pd.DataFrame) -> Finding:
        own = table["bound"] if "bound" in table else pd.Series(self.tolerance, table.index)
        beyond = table["value"].abs() > np.maximum(own.astype(float), self.tolerance if "bound" not in table else 0.0)
        worst = table["value"].abs().groupby(table["seed"]).max()
        note = f"{int(beyond.sum())} of {len(table)} rows lie beyond" if beyond.any() else ""
        verdict: Word = "refuted" if beyond.any() else "supported"
        return Finding(verdict, float(worst.max()), float(worst.min()), float(worst.max()), note=note)

    def draw(self, axes: Axes, table: pd.DataFrame, colour: str) -> None:
        errors = np.sort(np.maximum(table["value"].abs().to_numpy(dtype=float), ZERO))
        axes.plot(np.arange(1, len(errors) + 1) / len(errors), errors, "o", color=colour, zorder=3)

    def mark(self, axes: Axes) -> None:
        """Draw the tolerance."""
        from ntkexp.report.plots.style import VERMILION, log_axis  # noqa: PLC0415  drawing is slow to load

        log_axis(axes, "y")
        axes.axhline(self.tolerance, color=VERMILION, linewidth=0.8, linestyle="--")
        axes.set(xlabel="share of rows with a smaller error", ylabel="error")

    def invent(self, place: float, generator: np.random.Generator) -> pd.DataFrame:
        """Invent errors below the bound; outside, one of them is ten times above it."""
        values = self.tolerance * 10 ** -generator.uniform(0.01, 4, 10 * SEEDS)
        if place > 0:
            values[generator.integers(len(values))] = 10 * self.tolerance
        return pd.DataFrame({"seed": np.arange(len(values)) % SEEDS, "value": values})
