"""A number that a paper gives, to stand beside the same number as it was found here, by the paper's protocol.

numbers: [{what: "f(10) after a step", value: 35.6, where: {quantity: after, x: 10}}]

>>> rows = pd.DataFrame({"seed": [0, 1], "quantity": ["after", "after"], "value": [35.6, 35.6]})
>>> PublishedNumber(what="f(10) after a step", value=35.6, where={"quantity": "after"}).found(rows).value
35.6
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation.base import column
from ntkexp.component import Component
from ntkexp.records.sweep import level
from ntkexp.report.analysis.estimate import Estimate, mean_of


class PublishedNumber(Component):
    """`what` says what the number is, and of what data; here it is the mean over seeds of the rows that are chosen."""

    what: str = Field(min_length=1)
    value: float
    where: dict[str, Any]

    def found(self, table: pd.DataFrame) -> Estimate:
        """Find the number in a table that was judged; it is NaN at sizes that leave its rows out."""
        for key, wanted in self.where.items():
            table = table[column(table, key, "picture.numbers.where").isin([level(wanted)])]
        figures = table["value"].astype(float).groupby(table["seed"]).mean()
        return mean_of(figures.tolist()) if len(figures) else Estimate(float("nan"))

    def row(self, table: pd.DataFrame) -> dict[str, str | float]:
        """Set both side by side."""
        found = self.found(table)
        return {"what": self.what, "published": self.value, "here": found.value, "low": found.low, "high": found.high}
