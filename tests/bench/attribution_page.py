"""docs/attribution-trainings.csv, with the results of every training, and docs/attribution.md, its summary."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from statistics import mean

from tests.bench.cell import Table
from tests.bench.peers import ROOT

PAGE, LINES = ROOT / "docs" / "attribution.md", ROOT / "docs" / "attribution-trainings.csv"
COLUMNS = ("protocol", "training", "asked", "seeds", "score", "value", "reach")
SECTION = re.compile(r"<!-- measured: (?P<name>[^>]*) -->\n.*?<!-- end -->", re.DOTALL)
LITTLE = 0.5
"""A score with a smaller correlation counts as a failure. The threshold was chosen after looking."""
TRAINED, SECONDS = "retrained", "s"
WORDS = {
    "contrib.": "contribution",
    "infl.": "influence",
    "last": "last gradients",
    "5 effects": "mean of 5 effects",
    "d.TracIn": "TracIn (dattri)",
    "d.infl.": "influence (dattri)",
    "d.TRAK": "TRAK (dattri)",
    "t.TRAK": "TRAK (traker)",
    TRAINED: "retrained, one by one",
}
"""The names of scores on the page. Terminals show short ones."""


@dataclass(frozen=True)
class Line:
    """The correlations of a training by score, or its seconds."""

    training: str
    row: str
    values: dict[str, float]

    @property
    def best(self) -> str:
        """The score with the largest printed correlation, the first of equals."""
        scores = {name: value for name, value in self.values.items() if name != TRAINED}
        return max(scores, key=lambda each: scores[each])


@dataclass(frozen=True)
class Scores:
    """A printed table: training, row, seeds, and a column for each score."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def table(self) -> Table:
        """The table without the protocol."""
        return Table(self.title, self.header, self.rows)

    @property
    def name(self) -> str:
        """The name of the protocol.

        >>> Scores("Attribution, one run: 60 digits", (), ()).name
        'one run'
        """
        return self.title.partition(", ")[2].partition(":")[0]

    @property
    def cells(self) -> Iterator[tuple[str, ...]]:
        """The rows of the file: for each training and score its mean over seeds, and the half-width of its interval.

        >>> header, row = ("training", "asked", "seeds", "last"), ("MLP", "5 %", "3", ".1±.2")
        >>> list(Scores("Attribution, one run: x", header, (row,)).cells)
        [('one run', 'MLP', '5 %', '3', 'last', '0.1', '0.2')]
        """
        for training, row, seeds, *cells in self.rows:
            for score, cell in zip(self.header[3:], cells, strict=True):
                value, _, reach = cell.partition("±")
                if cell != "–":
                    yield self.name, training, row, seeds, score, f"{float(value):g}", reach and f"{float(reach):g}"


def write(tables: Sequence[Scores]) -> str:
    """Return the content of the file."""
    found = StringIO()
    csv.writer(found, lineterminator="\n").writerows([COLUMNS, *(row for table in tables for row in table.cells)])
    return found.getvalue()


def read(text: str) -> dict[str, list[Line]]:
    """Read the lines of each protocol from the file."""
    found = dict[str, dict[tuple[str, str], Line]]()
    for row in csv.DictReader(StringIO(text)):
        lines = found.setdefault(row["protocol"], {})
        line = lines.setdefault((row["training"], row["asked"]), Line(row["training"], row["asked"], {}))
        line.values[row["score"]] = float(row["value"])
    return {name: list(lines.values()) for name, lines in found.items()}


def page(measured: Mapping[str, Sequence[Line]], before: str) -> str:
    """Return the page with new results."""
    return SECTION.sub(lambda found: section(found["name"], measured[found["name"]]), before)


def section(name: str, lines: Sequence[Line]) -> str:
    """Return the section of a protocol: the means of each score, and a summary of all lines."""
    asked = [line for line in lines if line.row != SECONDS]
    said = [f"- {failures(asked)}"]
    if not any(TRAINED in line.values for line in asked):
        said.append(f"- {price([line for line in lines if line.row == SECONDS])}")
    return "\n".join([f"<!-- measured: {name} -->", "", *means(lines), "", *said, "", "<!-- end -->"])


def means(lines: Sequence[Line]) -> list[str]:
    """Return a row for each score: its mean over trainings, the number of trainings in which it is the best, and its
    seconds.

    >>> a, b = Line("a", "one", {"effect": 0.9, "last": 0.5}), Line("b", "one", {"effect": 0.8, "last": 0.9})
    >>> print(*means([a, b, Line("a", "s", {"effect": 2.0, "last": 1.0})]), sep="\\n")
    | score | one | CPU s |
    | --- | --: | --: |
    | effect | 0.85 (1) | 2.0 |
    | last gradients | 0.70 (1) | 1.0 |
    """
    kinds = {row: [line for line in lines if line.row == row] for row in dict.fromkeys(line.row for line in lines)}
    wins = {row: Counter(line.best for line in found) for row, found in kinds.items()}

    def value(score: str, row: str) -> str:
        known = [line.values[score] for line in kinds[row] if score in line.values]
        if row == SECONDS:
            return f"{mean(known):.1f}"
        best = "" if score == TRAINED else f" ({wins[row][score]})"
        return f"{mean(known):.2f}{best}" if known else "–"

    names = dict.fromkeys(score for found in kinds.values() for line in found for score in line.values)
    first = next(iter(kinds.values()))
    order = sorted(names, key=lambda score: -sum(line.values.get(score, -1.0) for line in first))
    head = ["score", *("CPU s" if row == SECONDS else row for row in kinds)]
    rows = [[WORDS.get(score, score), *(value(score, row) for row in kinds)] for score in order]
    ruled = [["---", *("--:" for _ in kinds)]]
    return [f"| {' | '.join(row)} |" for row in [head, *ruled, *rows]]


def price(lines: Sequence[Line]) -> str:
    """Compare the time of the true changes with the time of effects.

    >>> price([Line("a", "s", {"effect": 2.0, "retrained": 3.0}), Line("b", "s", {"effect": 1.0, "retrained": 4.0})])
    'All trainings without an example together take 1.5 to 4.0 times as long as `effect`, its training included.'
    """
    ratios = [line.values[TRAINED] / line.values["effect"] for line in lines]
    times = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    return f"All trainings without an example together take {times} as long as `effect`, its training included."


def failures(lines: Sequence[Line]) -> str:
    """List the lines in which even the best score fails."""
    best = [line.values[line.best] for line in lines]
    bad = [f"{line.training}, {line.row} ({most:.2f})" for line, most in zip(lines, best, strict=True) if most < LITTLE]
    if not bad:
        where = "nowhere"
    elif len(bad) < len(lines):
        where = f"in {len(bad)} of {len(lines)} lines: {'; '.join(bad)}"
    else:
        where = f"in all lines, with correlations of at most {max(best):.2f}"
    return f"Even the best score is below {LITTLE}, a threshold that was chosen after looking, {where}."
