"""docs/attribution.md: the tables that were measured, and under each what all its lines together say.

The sentences are made of the printed tables alone, so a test makes them again from the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.cell import Table
from tests.bench.peers import ROOT

PAGE = ROOT / "docs" / "attribution.md"
SECTION = re.compile(r"<!-- measured: (?P<name>[^>]*) -->\n.*?<!-- end -->", re.DOTALL)
LITTLE = 0.5
"""Below this no score is called good: a threshold that was chosen after looking."""
TRAINED = "retrained"


@dataclass(frozen=True)
class Line:
    """Correlations of a training, by score."""

    training: str
    row: str
    values: dict[str, float]

    @property
    def best(self) -> tuple[str, float]:
        """The score of the largest correlation as it is printed, the first of several."""
        scores = {name: value for name, value in self.values.items() if name != TRAINED}
        name = max(scores, key=lambda each: scores[each])
        return name, scores[name]


@dataclass(frozen=True)
class Scores:
    """A table as it is printed: training, row, seeds, and a column for every score."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def table(self) -> Table:
        """Its cells alone."""
        return Table(self.title, self.header, self.rows)

    @property
    def name(self) -> str:
        """Which of the tables it is.

        >>> Scores("Attribution, one run: 60 digits", (), ()).name
        'one run'
        """
        return self.title.partition(", ")[2].partition(":")[0]

    @property
    def text(self) -> str:
        """For a terminal."""
        return self.table.text

    @property
    def lines(self) -> list[Line]:
        """Correlations as they are printed; seconds are no lines."""
        return [line for line in self.every_line if line.row != "s"]

    @property
    def seconds(self) -> list[Line]:
        """The seconds of every training."""
        return [line for line in self.every_line if line.row == "s"]

    @property
    def every_line(self) -> list[Line]:
        """All rows, as numbers."""
        found = []
        for training, row, _, *cells in self.rows:
            known = zip(self.header[3:], cells, strict=True)
            values = {name: float(cell.partition("±")[0]) for name, cell in known if cell != "–"}
            found.append(Line(training, row, values))
        return found


def read(text: str) -> Scores:
    """A table from its print: cells are two spaces apart.

    >>> header = ("training", "left out", "seeds", "last")
    >>> made = Scores("Attribution, one run: x", header, (("MLP", "5 %", "3", ".1"),))
    >>> read(made.text) == made
    True
    """
    title, header, *rows = (tuple(re.split(" {2,}", line.strip())) for line in text.strip().splitlines())
    return Scores("  ".join(title), header, tuple(rows))


def page(tables: Sequence[Scores], before: str) -> str:
    """The page, with what was measured in place of what was."""
    by_name = {each.name: each for each in tables}
    return SECTION.sub(lambda found: section(by_name[found["name"]]), before)


def tables_of(text: str) -> list[Scores]:
    """The tables of a page."""
    return [read(block) for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]


def section(measured: Scores) -> str:
    """A table, and what it says."""
    said = f"\n{sentences(measured)}\n" if measured.lines else ""
    return f"<!-- measured: {measured.name} -->\n\n```text\n{measured.text}```\n{said}\n<!-- end -->"


def sentences(measured: Scores) -> str:
    """What all lines say together: an item for each kind of row, one for where all scores fail, and one for prices."""
    kinds = dict.fromkeys(line.row for line in measured.lines)
    found = [of_kind(kind, [line for line in measured.lines if line.row == kind]) for kind in kinds]
    found.append(failures(measured.lines))
    if not any(TRAINED in line.values for line in measured.lines):
        found.append(price(measured.seconds))
    return "\n".join(f"- {text}" for text in found)


def price(lines: Sequence[Line]) -> str:
    """How much longer the truth takes than effects.

    >>> price([Line("a", "s", {"effect": 2.0, "retrained": 3.0}), Line("b", "s", {"effect": 1.0, "retrained": 4.0})])
    'All trainings without an example together take 1.5 to 4.0 times as long as `effect`, its training included.'
    """
    ratios = [line.values[TRAINED] / line.values["effect"] for line in lines]
    times = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    return f"All trainings without an example together take {times} as long as `effect`, its training included."


def of_kind(kind: str, lines: Sequence[Line]) -> str:
    """Who is best, by means over lines, and how often; and the retrainings of one run, where they are a score."""
    means = {name: sum(line.values[name] for line in lines) / len(lines) for name in lines[0].values}
    trained = means.pop(TRAINED, None)
    order = sorted(means, key=lambda name: -means[name])
    wins = Counter(line.best[0] for line in lines)
    often = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    told = ", ".join(f"{name} {means[name]:.2f}" for name in order)
    text = f"`{kind}`, means over {len(lines)} lines: {told}. Lines in which it is best (the first of equals): {often}."
    if trained is None:
        return text
    return f"{text} What leaving out one by one does in the run itself (`{TRAINED}`): {trained:.2f}."


def failures(lines: Sequence[Line]) -> str:
    """Where even the best score says little."""
    bad = [f"{line.training}, {line.row} ({line.best[1]:.2f})" for line in lines if line.best[1] < LITTLE]
    if not bad:
        where = "nowhere"
    elif len(bad) < len(lines):
        where = f"in {len(bad)} of {len(lines)} lines: {'; '.join(bad)}"
    else:
        where = f"in all lines, with correlations of at most {max(line.best[1] for line in lines):.2f}"
    return f"Even the best score is below {LITTLE}, a threshold that was chosen after looking, {where}."
