"""What the page of explanations shows of a point: what made its output, what would change it, what a removal did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ntkexp.report.effects import known_effects
from ntkexp.report.explain import Explanation
from ntkexp.report.explain_text import called, notes
from ntkexp.report.ledger import LedgerEntry
from ntkexp.report.page.inline import slug
from ntkexp.report.page.picture import Shown, shown
from ntkexp.report.page.table import Table, tabled
from ntkexp.report.plots import answers
from ntkexp.report.plots.examples import draw
from ntkexp.report.plots.explanation import row
from ntkexp.report.plots.style import house_style
from ntkexp.report.plots.sweep_plots import Picture
from ntkexp.report.run import Run
from ntkexp.text import short

NUMBERS = ("added", "if left out", "half by")


@dataclass(frozen=True)
class PointView:
    """The page shows this of a point."""

    anchor: str
    title: str
    pieces: Table
    examples: Table
    notes: tuple[str, ...]
    pictures: tuple[Shown, ...]
    removal: str


def point_views(found: Sequence[Explanation], removed: Sequence[LedgerEntry]) -> list[PointView]:
    """Show each point, and what a removal changed there, if one was asked for."""
    entries = {entry.number: entry for entry in removed}
    return [point_view(explanation, entries.get(explanation.number)) for explanation in found]


def point_view(explanation: Explanation, entry: LedgerEntry | None) -> PointView:
    """Show one point."""
    name = f"{explanation.split} {explanation.number}"
    anchor = slug(name.replace(" ", "-"))
    point = explanation.point
    return PointView(
        anchor=anchor,
        title=f"{name}: {point.text or point.label}, {explanation.output} = {short(explanation.prediction)}",
        pieces=pieces(explanation, anchor),
        examples=examples(explanation, anchor),
        notes=tuple(notes(explanation)),
        pictures=tuple(shown(picture, anchor) for picture in pictures(explanation, entry)),
        removal="" if entry is None else removed(entry),
    )


def pieces(explanation: Explanation, anchor: str) -> Table:
    """Tabulate what an output is made of; the rows above the last add up to it."""
    rows: Mapping[str, float] = {**explanation.pieces, "output": explanation.prediction}
    return tabled(("made of", "value"), (False, True), list(rows.items()), f"pieces-{anchor}", "What the output is")


def examples(explanation: Explanation, anchor: str) -> Table:
    """Tabulate all examples, those first that added or took most."""
    phased = explanation.point.phase is not None
    rows = [
        (
            called(part.example),
            part.example.text or part.example.name,
            *([part.example.phase] if phased else []),
            part.added,
            part.left_out,
            part.halfway,
        )
        for part in explanation.parts
    ]
    columns = ("example", "holds", *(["phase"] if phased else []), *NUMBERS)
    are_numbers = [False, False, *[True] * (len(columns) - 2)]
    return tabled(columns, are_numbers, rows, f"examples-{anchor}", "All training examples")


def pictures(explanation: Explanation, entry: LedgerEntry | None) -> Iterator[Picture]:
    """Draw a point beside its examples, both answers as bars, when it came, and how a removal splits."""
    with house_style():
        yield Picture("examples", draw([row(explanation)]), numbers(explanation))
    yield answers.beside(explanation)
    if (moved := explanation.movement) is not None:
        yield answers.when(moved.by_step, "When training moved this output", moved.last_step)
    if entry is not None:
        yield answers.shares(entry)
        yield answers.when(entry.by_step, "At which steps leaving them out made its change")


def numbers(explanation: Explanation) -> pd.DataFrame:
    """Tabulate what each example added."""
    rows = [(part.example.index, part.example.name, part.added) for part in explanation.parts]
    return pd.DataFrame(rows, columns=["example", "holds", "added"])


def removed(entry: LedgerEntry) -> str:
    """Say what leaving a group out was predicted to change, and changed."""
    several = f", by the sum of {len(entry.places)} effects, which do not add" if len(entry.places) > 1 else ""
    predicted = "" if entry.predicted is None else f" (predicted: {short(entry.before + entry.predicted)}{several})"
    return (
        f"Trained again without {len(entry.places)} of the examples, the output is "
        f"{short(entry.before + entry.actual)} instead of {short(entry.before)}{predicted}."
    )


def check(run: Run) -> tuple[str, Shown | None]:
    """Say whether predicted changes came true, and draw it, where that was tried."""
    known = known_effects(run)
    if known is None or known.check is None or known.agreement is None:
        return "", None
    return known.agreement.sentence, shown(answers.checked(known.check, known.agreement), "check")
