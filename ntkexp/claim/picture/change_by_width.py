"""How far weights and kernel move, against width, log–log, beside lines of 1/√n and 1/n.

The axes are those of J. Lee et al., "Wide neural networks of any depth evolve as linear models under gradient descent"
(2019), arXiv:1902.06720, figure 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation.base import chosen
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.report.analysis.laws_in_words import number
from ntkexp.report.analysis.power_law import PowerLaw, power_law
from ntkexp.text import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim


class ChangeByWidth(AbstractPicture):
    """Each panel has lines, named columns of the rows that `where` chooses; the last is the one of the title."""

    along: str = "model.width"
    where: dict[str, Any] = Field(default_factory=dict)
    panels: dict[str, dict[str, str]] = Field(min_length=1)

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.report.plots.redrawn.change_by_width import draw  # noqa: PLC0415  drawing is slow to load

        return draw(self.rows(judged), self.along, self.panels, self.title(judged))

    def here(self, judged: JudgedClaim) -> str:
        rows = self.rows(judged)
        told = [
            listed([f"{line} {number(self.law(rows, name).exponent.value)}" for line, name in lines.items()])
            for lines in self.panels.values()
        ]
        return f"the exponents of width are: {'; '.join(told)}, by {rows['seed'].nunique()} seeds."

    def title(self, judged: JudgedClaim) -> str:
        """Say how the last line goes, and which of the two it is nearer to."""
        panel, lines = list(self.panels.items())[-1]
        found = self.law(self.rows(judged), list(lines.values())[-1]).exponent.value
        near, far = ("1/n", "1/√n") if found < -0.75 else ("1/√n", "1/n")
        return f"The change of the {panel} goes as n to the power {number(found)}, nearer to {near} than to {far}"

    def rows(self, judged: JudgedClaim) -> pd.DataFrame:
        """Find the rows that are drawn."""
        columns = [name for lines in self.panels.values() for name in lines.values()]
        return chosen(judged.rows(self.along, "seed"), self.where).dropna(subset=columns)

    def law(self, rows: pd.DataFrame, name: str) -> PowerLaw:
        """Fit one line."""
        x, y = (np.asarray(rows[key], dtype=np.float64) for key in (self.along, name))
        return power_law(x, y, rows["seed"].to_numpy(dtype=np.int64))
