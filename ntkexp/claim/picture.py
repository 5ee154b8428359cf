"""How a claim is drawn, from the tables that were judged, beside the numbers that a paper gives; and the picture of a
claim that says nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import Field

from ntkexp.claim.claim import MAIN, SECOND, Claim
from ntkexp.claim.expectation import AbstractExpectation, find_column, select_rows
from ntkexp.claim.judge import judge_part
from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord
from ntkexp.records.sweep import level
from ntkexp.report.analysis.estimate import Estimate, mean_of
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class JudgedClaim:
    """A claim was judged so, by the tables of its looks."""

    claim: Claim
    record: ClaimRecord
    tables: Mapping[str, pd.DataFrame]

    @property
    def table(self) -> pd.DataFrame:
        """The first look, which is the claim's own, was judged by this table."""
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

    `what` says what the number is, and of what data; here it is the mean over seeds of the rows that are chosen.

    numbers: [{what: "f(10) after a step", value: 35.6, where: {quantity: after, x: 10}}]

    >>> rows = pd.DataFrame({"seed": [0, 1], "quantity": ["after", "after"], "value": [35.6, 35.6]})
    >>> PublishedNumber(what="f(10) after a step", value=35.6, where={"quantity": "after"}).estimate(rows).value
    35.6
    """

    what: str = Field(min_length=1)
    value: float
    where: dict[str, Any]

    def estimate(self, table: pd.DataFrame) -> Estimate:
        """Find the number in a table that was judged; it is NaN at sizes that leave its rows out."""
        for key, wanted in self.where.items():
            table = table[find_column(table, key, "picture.numbers.where").isin([level(wanted)])]
        figures = table["value"].astype(float).groupby(table["seed"]).mean()
        return mean_of(figures.tolist()) if len(figures) else Estimate(float("nan"))

    def row(self, table: pd.DataFrame) -> dict[str, str | float]:
        found = self.estimate(table)
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
        parts = [f"Published: {self.published}" if self.published else "", f"Here: {here}" if here else ""]
        return " ".join(filter(None, parts))


MOST = 3
HEIGHT = 2.5  # inches


class JudgedRows(AbstractPicture):
    """The rows of the first look, those of the second behind them, and what was expected.

    A claim that says nothing of its picture has this one.

    Each part of the claim has a place of its own, up to three of them, that which decides first; blue is the first
    look, orange the second.
    """

    def figure(self, judged: JudgedClaim) -> Figure:
        from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

        from ntkexp.report.plots.style import BLUE, NARROW, ORANGE, WIDE, heading, wrapped  # noqa: PLC0415  the same

        looks, parts = {SECOND: ORANGE, MAIN: BLUE}, drawn_parts(judged)
        figure = Figure(figsize=(NARROW if len(parts) == 1 else WIDE, HEIGHT), layout="constrained")
        for axes, of_looks in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            for (name, colour), part in zip(looks.items(), of_looks, strict=True):
                rows = drawable(part, judged.tables[name])
                if rows is not None:
                    part.draw(axes, rows, colour)
            of_looks[-1].mark(axes)
            if len(parts) > 1:
                axes.set_title("\n".join(wrapped(of_looks[-1].whole_words, 44 // len(parts) * 2)))
        heading(figure, title(judged.record))
        return figure

    def here(self, judged: JudgedClaim) -> str:
        there, shown = len(judged.claim.looks[MAIN].expectation), len(drawn_parts(judged))
        missing = f"; of {there} parts that are expected, {shown} are drawn" if shown < there else ""
        return f"blue is the claim's own look, orange the second{missing}."


def drawn_parts(judged: JudgedClaim) -> list[tuple[AbstractExpectation, ...]]:
    """The parts that are drawn, as the second look and as the first has them: that first which decides the first."""
    found = zip(*(judged.claim.looks[name].expectation for name in (SECOND, MAIN)), strict=False)
    return sorted(found, key=lambda part: not judged.record.main.expected.startswith(part[-1].whole_words))[:MOST]


def title(record: ClaimRecord) -> str:
    main = record.main
    found = f"{short(main.figure)}, 95 % {short(main.low)} to {short(main.high)}"
    return f"{record.name.replace('_', ' ').capitalize()}: {main.verdict} ({found})"


def drawable(part: AbstractExpectation, table: pd.DataFrame) -> pd.DataFrame | None:
    """Find the rows that can be drawn, if the part could speak of them."""
    try:
        rows = select_rows(table, part.where)
        rows = rows[rows["value"].notna()]
        return rows if len(rows) and judge_part(part, rows) else None
    except Mistake:
        return None
