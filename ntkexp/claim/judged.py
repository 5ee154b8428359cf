"""A judged claim with its tables, and the base class of pictures of such claims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation import find_column
from ntkexp.claim.look import MAIN, Look
from ntkexp.component import Component
from ntkexp.records.claim import ClaimRecord
from ntkexp.records.sweep import level
from ntkexp.report.analysis.estimate import Estimate, Range, mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure  # noqa: PLC0414  pictures of papers import it
else:
    Figure = Any  # matplotlib is slow to import


@dataclass(frozen=True)
class JudgedClaim:
    """The statistical tests (looks) of a claim, the record of the verdict,
    and the judged tables."""

    looks: Mapping[str, Look]
    record: ClaimRecord
    tables: Mapping[str, pd.DataFrame]

    @property
    def table(self) -> pd.DataFrame:
        """The judged table of the main look (statistical test)."""
        return self.tables[MAIN]

    def rows(self, *columns: str, look: str = MAIN) -> pd.DataFrame:
        """Return the rows of a look's judged table that have numbers in all
        of these columns.

        The judged table has a row for each judged number, so it may repeat a row of
        measurements. The result contains each row of measurements once."""
        table = self.tables[look]
        for name in columns:
            find_column(table, name, "picture")
        measured = table.drop(columns=["value", "quantity"], errors="ignore")
        measured = measured.drop_duplicates().dropna(subset=list(columns))
        return measured.reset_index(drop=True)


class PublishedNumber(Component):
    """A number from a paper. It is shown next to the measurement of the same number.

    `what` describes the number and its data. `where` selects rows, and the measurement
    is the mean over seeds of these rows. If `within` gives the possible range of the
    number, such as [0, 1] for shares, the interval stays in this range.

    numbers: [{what: "f(10) after a step", value: 35.6, where: {quantity: after,
    x: 10}}]

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
        """Estimate the number from a judged table.

        Return NaN if no row is selected, which is normal at small sizes of the claim.
        """
        for key, value in self.where.items():
            table = table[
                find_column(table, key, "picture.numbers.where").isin([level(value)])
            ]
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

    The picture does not influence the verdict, and is not part of the claim's digest.
    `published` is the caption of the corresponding figure in the replicated paper.

    picture: {_target_: ntkexp.claim.picture.ScalarStep, published: A line and a step.}
    """

    has_judged_rows_only: ClassVar[bool] = False
    """True if the picture shows only judged rows. These rows are published."""

    published: str = ""
    numbers: tuple[PublishedNumber, ...] = ()

    @abstractmethod
    def figure(self, judged: JudgedClaim) -> Figure:
        """Draw the picture."""

    def here(self, judged: JudgedClaim) -> str:
        """Return a description of the measurements. The caption shows it after the
        description of the published picture. Return "" if the title suffices."""
        return ""

    def table(self, judged: JudgedClaim) -> pd.DataFrame | None:
        """Return a table of the paper's numbers next to the measurements, or None if
        the picture has no such numbers."""
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
