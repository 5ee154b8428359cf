"""The rows of the first look, those of the second behind them, and what was expected.

Each part of the claim has a place of its own, up to three of them, that which decides first; blue is the first look,
orange the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from ntkexp.claim.claim import MAIN, SECOND
from ntkexp.claim.expectation.base import AbstractExpectation, chosen
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord
from ntkexp.text import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim

MOST = 3
HEIGHT = 2.5  # inches


class JudgedRows(AbstractPicture):
    """A claim that says nothing of its picture has this one."""

    def figure(self, judged: JudgedClaim) -> Figure:
        from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

        from ntkexp.report.plots.style import BLUE, NARROW, ORANGE, WIDE, heading, wrapped  # noqa: PLC0415  the same

        looks, parts = {SECOND: ORANGE, MAIN: BLUE}, drawn(judged)
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
        there, shown = len(judged.claim.looks[MAIN].expectation), len(drawn(judged))
        missing = f"; of {there} parts that are expected, {shown} are drawn" if shown < there else ""
        return f"blue is the claim's own look, orange the second{missing}."


def drawn(judged: JudgedClaim) -> list[tuple[AbstractExpectation, ...]]:
    """The parts that are drawn, as the second look and as the first has them: that first which decides the first."""
    found = zip(*(judged.claim.looks[name].expectation for name in (SECOND, MAIN)), strict=False)
    return sorted(found, key=lambda part: not judged.record.main.expected.startswith(part[-1].whole_words))[:MOST]


def title(record: ClaimRecord) -> str:
    """Say in a sentence what was found."""
    main = record.main
    found = f"{short(main.figure)}, 95 % {short(main.low)} to {short(main.high)}"
    return f"{record.name.replace('_', ' ').capitalize()}: {main.verdict} ({found})"


def drawable(part: AbstractExpectation, table: pd.DataFrame) -> pd.DataFrame | None:
    """Find the rows that can be drawn, if the part could speak of them."""
    try:
        rows = chosen(table, part.where)
        rows = rows[rows["value"].notna()]
        return rows if len(rows) and part.judge(rows) else None
    except Mistake:
        return None
