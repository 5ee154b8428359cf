"""The default picture of a claim.

A look is one statistical test of the claim. A part is one rule that the look tests.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ntkexp.claim.expectation import AbstractExpectation, select_rows
from ntkexp.claim.judge import judge_part
from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.look import MAIN, SECOND
from ntkexp.mistake import Mistake
from ntkexp.text import short

MAX_PARTS_DRAWN = 3
HEIGHT_INCHES = 2.5
TITLE_LINE = 63  # characters of a line of titles, over all panels


class JudgedRows(AbstractPicture):
    """The judged rows with the expected range: blue for the main look,
    orange for the second.

    This is the default picture. It shows up to three parts of the expectation, each
    with its own axes. The deciding part comes first."""

    has_judged_rows_only = True

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.rule_picture import draw_rows, mark_range  # noqa: PLC0415  loads matplotlib
        from ntkexp.report.plots import style  # noqa: PLC0415  loads matplotlib
        from ntkexp.report.plots.canvas import Canvas  # noqa: PLC0415  loads matplotlib

        colours = {SECOND: style.ORANGE, MAIN: style.BLUE}
        pairs = pairs_of_parts(judged)
        width = style.NARROW if len(pairs) == 1 else style.WIDE
        canvas = Canvas()
        panels = canvas.panels((width, HEIGHT_INCHES), 1, len(pairs))[0]
        for axes, pair in zip(panels, pairs, strict=True):
            for (name, colour), part in zip(colours.items(), pair, strict=True):
                for group in drawable_groups(part, judged.tables[name]):
                    draw_rows(part, axes, group, colour)
            main_part = pair[-1]
            mark_range(main_part, axes)
            if len(pairs) > 1:
                words = main_part.whole_words.replace(" ± 0 %", "")
                axes.set_title(
                    "\n".join(style.wrapped(words, TITLE_LINE // len(pairs)))
                )

        # the title shows the name and the verdict, and the caption shows the figure
        # with its interval
        record = judged.record
        name = record.name.replace("_", " ").capitalize()
        interval = (
            f"95 % interval {short(record.main.low)} to {short(record.main.high)}"
        )
        caption = f"Main look: {short(record.main.figure)}, {interval}."
        return canvas.finish(f"{name}: {record.verdict}", caption)

    def here(self, judged: JudgedClaim) -> str:
        parts = len(judged.looks[MAIN].expectation)
        drawn = len(pairs_of_parts(judged))
        missing = f"; {drawn} of {parts} parts are drawn" if drawn < parts else ""
        return f"blue is the main look, orange the second look{missing}."


def pairs_of_parts(judged: JudgedClaim) -> list[tuple[AbstractExpectation, ...]]:
    """Return the parts (rules) to draw. Each is a pair: the rule of the second look and
    the rule of the main look. The deciding part comes first."""
    pairs = zip(
        *(judged.looks[name].expectation for name in (SECOND, MAIN)), strict=False
    )
    expected = judged.record.main.expected
    deciding_first = sorted(
        pairs, key=lambda pair: not expected.startswith(pair[-1].whole_words)
    )
    return deciding_first[:MAX_PARTS_DRAWN]


def drawable_groups(
    part: AbstractExpectation, table: pd.DataFrame
) -> Iterable[pd.DataFrame]:
    """Return the rows that a part (rule) selects, split by its levels. Return nothing
    if the rule cannot judge them."""
    try:
        rows = select_rows(table, part.where)
        rows = rows[rows["value"].notna()]
        if len(rows):
            judge_part(part, rows)
            return part.levels(rows).values()
    except Mistake:
        pass
    return ()
