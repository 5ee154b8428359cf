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
    """The looks at a claim, the record of the verdict, and the judged tables."""

    looks: Mapping[str, Look]
    record: ClaimRecord
    tables: Mapping[str, pd.DataFrame]

    @property
    def table(self) -> pd.DataFrame:
        """The table of the main look."""
        return self.tables[MAIN]

    def rows(self, *columns: str, look: str = MAIN) -> pd.DataFrame:
        """Return the rows that have all of these columns.

        A row that was judged by several of its numbers appears once.
        """
        table = self.tables[look]
        for name in columns:
            find_column(table, name, "picture")
        once = table.drop(columns=["value", "quantity"], errors="ignore").drop_duplicates()
        return once.dropna(subset=list(columns)).reset_index(drop=True)


class PublishedNumber(Component):
    """A number from a paper, to be shown next to the same number measured here.

    `what` describes the number and its data. The number measured here is the mean over seeds of the
    rows that `where` selects. If it lies `within` a range, as shares do, its interval does too.

    numbers: [{what: "f(10) after a step", value: 35.6, where: {quantity: after, x: 10}}]

    >>> rows = pd.DataFrame({"seed": [0, 1], "quantity": ["after", "after"], "value": [35.6, 35.6]})
    >>> number = PublishedNumber(what="f(10)", value=35.6, where={"quantity": "after"})
    >>> number.estimate(rows).value
    35.6
    """

    what: str = Field(min_length=1)
    value: float
    where: dict[str, Any]
    within: Range | None = None

    def estimate(self, table: pd.DataFrame) -> Estimate:
        """Estimate the number from a judged table; without rows, as at small sizes, return NaN."""
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


class AbstractPicture(Component, ABC):
    """A picture of a claim, drawn from the judged tables.

    It decides nothing, and the digest of the claim does not cover it. `published` describes the
    figure of the paper.

    picture: {_target_: ntkexp.claim.picture.ScalarStep, published: A line and a step.}
    """

    published: str = ""
    numbers: tuple[PublishedNumber, ...] = ()

    @abstractmethod
    def figure(self, judged: JudgedClaim) -> Figure:
        """Draw the picture."""

    def here(self, judged: JudgedClaim) -> str:
        """Describe the rows in sentences, or return nothing if the title suffices."""
        return ""

    def table(self, judged: JudgedClaim) -> pd.DataFrame | None:
        """Return the numbers of the paper and those measured here, if the paper has any."""
        if not self.numbers:
            return None
        return pd.DataFrame([number.row(judged.table) for number in self.numbers])

    def caption(self, judged: JudgedClaim) -> str:
        parts = []
        if self.published:
            parts.append(f"Published: {self.published}")
        if here := self.here(judged):
            parts.append(f"Here: {here}")
        return " ".join(parts)
