"""A report for a paper or a terminal: the same sentences and tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from ntkexp.report.analysis.laws_in_words import summary
from ntkexp.report.material import Material
from ntkexp.report.page.headline import what_came_out, what_was_run
from ntkexp.report.page.sweep_view import fits, points
from ntkexp.report.table import combined, written


def markdown(material: Material) -> str:
    """Write the whole report."""
    return "\n\n".join(parts(material)) + "\n"


def parts(material: Material) -> Iterator[str]:
    """Go through sentences and tables, in the order of the page."""
    yield f"# {escaped(what_was_run(material))}"
    yield escaped(what_came_out(material.runs))
    for analysis in material.analyses:
        yield f"## {escaped(analysis.sweep.name)}"
        if analysis.laws:
            yield escaped(summary(analysis.laws, analysis.draws))
            yield piped(fits(analysis))
        yield piped(points(analysis))
    yield "## All runs"
    yield piped(combined(material.runs))


def piped(table: pd.DataFrame) -> str:
    """Write a table between bars, numbers to the right."""
    numeric = [pd.api.types.is_numeric_dtype(table[name]) for name in table]
    rules = ["---:" if right else "---" for right in numeric]
    rows = table.astype(object).where(table.notna(), None).itertuples(index=False)
    lines = [[str(name) for name in table], *([written(value) for value in row] for row in rows)]
    bars = ["| " + " | ".join(escaped(cell) for cell in line) + " |" for line in lines]
    return "\n".join([bars[0], f"| {' | '.join(rules)} |", *bars[1:]])


def escaped(text: str) -> str:
    r"""Write text so that Markdown reads it as text.

    >>> print(escaped("a|b <c> x_1"))
    a\|b \<c\> x\_1
    """
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>|#" else letter for letter in text.replace("\n", " "))
