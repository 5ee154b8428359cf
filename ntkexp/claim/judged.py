"""A judged claim as its picture sees it, and the base class of pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation import find_column
from ntkexp.claim.look import MAIN, Look
from ntkexp.component import Component
from ntkexp.records.claim import ClaimRecord
from ntkexp.records.sweep import level
from ntkexp.report.analysis.estimate import Estimate, Range, mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class JudgedClaim:
    """The looks at a claim, the record of the verdict, and the tables that were judged."""

    looks: Mapping[str, Look]
    record: ClaimRecord
    tables: Mapping[str, pd.DataFrame]

    @property
    def table(self) -> pd.DataFrame:
        """The table of the claim's own look."""
        return self.tables[MAIN]

    def rows(self, *columns: str, look: str = MAIN) -> pd.DataFrame:
        """Find the rows that have all of these columns, each once, though several of its numbers may be judged."""
        table = self.tables[look]
        for name in columns:
            find_column(table, name, "picture")
        once = table.drop(columns=["value", "quantity"], errors="ignore").drop_duplicates()
        return once.dropna(subset=list(columns)).reset_index(drop=True)


class PublishedNumber(Component):
    """A number that a paper gives, to stand beside the same number as it was found here, by the paper's protocol.

    `what` says what the number is, and of what data; here it is the mean over seeds of the rows that are chosen. If it
    lies `within` two ends, as shares do, its interval lies there too.

    numbers: [{what: "f(10) after a step", value: 35.6, where: {quantity: after, x: 10}}]

    >>> rows = pd.DataFrame({"seed": [0, 1], "quantity": ["after", "after"], "value": [35.6, 35.6]})
    >>> PublishedNumber(what="f(10) after a step", value=35.6, where={"quantity": "after"}).estimate(rows).value
    35.6
    """

    what: str = Field(min_length=1)
    value: float
    where: dict[str, Any]
    within: Range | None = None

    def estimate(self, table: pd.DataFrame) -> Estimate:
        """Find the number in a table that was judged; it is NaN at sizes that leave its rows out."""
        for key, value in self.where.items():
            table = table[find_column(table, key, "picture.numbers.where").isin([level(value)])]
        figures = table["value"].astype(float).groupby(table["seed"]).mean()
        return mean_of(figures.tolist(), self.within)

    def row(self, table: pd.DataFrame) -> dict[str, str | float]:
        estimate = self.estimate(table)
        return {
            "what": self.what,
            "published": self.value,
            "here": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
        }


# --- The picture of a claim is drawn from the judged tables. It decides nothing, and the claim's digest does not
# cover it.
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
        return (
            pd.DataFrame([one.row(judged.table) for one in self.numbers]) if self.numbers else None
        )

    def caption(self, judged: JudgedClaim) -> str:
        """Say what the paper shows, and what is shown here."""
        here = self.here(judged)
        parts = [
            f"Published: {self.published}" if self.published else "",
            f"Here: {here}" if here else "",
        ]
        return " ".join(filter(None, parts))
