"""How a claim is drawn, from the tables that were judged, beside the numbers that a paper gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation.base import column
from ntkexp.component import Component
from ntkexp.records.sweep import level
from ntkexp.report.analysis.estimate import Estimate, mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.claim import JudgedClaim


class PublishedNumber(Component):
    """A number that a paper gives, to stand beside the same number as it was found here, by the paper's protocol.

    `what` says what the number is, and of what data; here it is the mean over seeds of the rows that are chosen.

    numbers: [{what: "f(10) after a step", value: 35.6, where: {quantity: after, x: 10}}]

    >>> rows = pd.DataFrame({"seed": [0, 1], "quantity": ["after", "after"], "value": [35.6, 35.6]})
    >>> PublishedNumber(what="f(10) after a step", value=35.6, where={"quantity": "after"}).found(rows).value
    35.6
    """

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


# --- How a claim is drawn, from the tables that were judged: it decides nothing, and the claim's digest knows none of
# it.
#
# picture: {_target_: ntkexp.claim.picture.ScalarStep, published: what the paper's own figure shows}


class AbstractPicture(Component, ABC):
    """A picture has a caption: what the paper's figure shows, which is `published`, and what the rows show here."""

    published: str = ""
    numbers: tuple[PublishedNumber, ...] = ()

    @abstractmethod
    def figure(self, judged: JudgedClaim) -> Figure:
        """Draw the picture."""

    def here(self, judged: JudgedClaim) -> str:
        """Say in whole sentences what the rows show; nothing where the picture's title says it."""
        return ""

    def table(self, judged: JudgedClaim) -> pd.DataFrame | None:
        """Make the table that the paper has, if it has one: its numbers, and beside them those found here."""
        return pd.DataFrame([one.row(judged.table) for one in self.numbers]) if self.numbers else None

    def caption(self, judged: JudgedClaim) -> str:
        """Say what the paper shows, and what is shown here."""
        here = self.here(judged)
        said = [f"Published: {self.published}" if self.published else "", f"Here: {here}" if here else ""]
        return " ".join(filter(None, said))
