"""The ledger of a removal as a reader sees it, as numbers and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.atomic import Json
from ntkexp.records.contributions import Removal
from ntkexp.report.examples import Example, example, example_names, output_name
from ntkexp.report.explain import NOT_COMPUTED, effects_of_run, fitting, outputs_of
from ntkexp.report.leave_out import Agreement
from ntkexp.report.run import Run
from ntkexp.report.tables import Column, Table, format_signed, format_text
from ntkexp.text import counted, percent, short

# --- The ledger of a removal as a reader sees it: for every point and output what was predicted, what came, and
# shares.


Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class LedgerEntry:
    """One output at one point, before and after a group of examples was left out."""

    split: str
    number: int
    point: Example
    out: int
    output: str
    before: float
    predicted: float | None
    actual: float
    places: tuple[int, ...]
    names: tuple[str, ...]
    examples: tuple[Example, ...]
    shares: Array
    by_step: Array
    cancellation: float
    growth: float

    @property
    def as_json(self) -> dict[str, Json]:
        return {
            "split": self.split,
            "point": self.number,
            "out": self.out,
            "predicted": self.predicted,
            "actual": self.actual,
            "shares": {
                name: float(share) for name, share in zip(self.names, self.shares, strict=True)
            },
            "places": self.places,
            "by_step": [float(share) for share in self.by_step],
            "cancellation": self.cancellation,
            "growth": self.growth,
        }


def ledger_entries(run: Run, split: str, numbers: list[int], removal: Removal) -> list[LedgerEntry]:
    """Put the removal in words of the run: an entry for each point, and each output there."""
    known, names, before = effects_of_run(run), example_names(run), outputs_of(run, "f_T")
    group = list(removal.example)
    made = []
    for row, (number, k) in enumerate(zip(numbers, removal.probe, strict=True)):
        for column, out in enumerate(removal.out):
            predicted = (
                None
                if known is None or out not in run.outs
                else known[k, run.outs.index(out), group].sum()
            )
            made.append(
                LedgerEntry(
                    split=split,
                    number=number,
                    point=example(run, split, number),
                    out=out,
                    output=output_name(run, out, before.shape[1]),
                    before=float(before[k, out]),
                    predicted=float(predicted)
                    if predicted is not None and np.isfinite(predicted)
                    else None,
                    actual=float(removal.actual[row, column]),
                    places=removal.example,
                    names=tuple(names[i] for i in group),
                    examples=tuple(example(run, "train", i) for i in group),
                    shares=removal.shares[row, column],
                    by_step=removal.by_step[row, column],
                    cancellation=float(removal.cancellation[row, column]),
                    growth=removal.growth,
                )
            )
    return made


# --- Ledgers as a reader sees them: lines on a terminal.


STRETCHES = 10
CHAOS = (
    1e3  # of the growth of the sweep: beyond it, single shares are those of rounding and of chance
)


def format_ledger(
    entries: Sequence[LedgerEntry],
    removal: Removal,
    agreement: Agreement | None,
    top: int,
    order: str = "",
) -> str:
    """Say what leaving the group out changed: first of all points, then of each; `order` put some at its top."""
    notes = [] if agreement is None else [agreement.sentence]
    if len(removal.example) > 1 and any(entry.predicted is not None for entry in entries):
        # examples of a group act on one another, which no sum of their effects knows
        notes.append(
            f"predicted: the sum of {len(removal.example)} effects, each of leaving out one example alone; effects of "
            "a group do not add, so this is not the effect of the group, however well those of single examples are "
            "predicted; actual is"
        )
    return (
        "\n\n".join(
            [
                ledger_heading(removal, order),
                *notes,
                *(format_entry(entry, top) for entry in entries),
            ]
        )
        + "\n"
    )


def ledger_heading(removal: Removal, order: str = "") -> str:
    """Say what was done, and how well it is known."""
    group = counted(len(removal.example), "example") + f" (at the top: those {order})" * bool(order)
    clauses = [
        f"trained again without {group}, from the same start, in the same order, for as many steps"
    ]
    if removal.emptied:
        steps = counted(removal.emptied, "step")
        clauses.append(
            f"in {steps} nothing was left of the batch: memory and decay alone moved the weights"
        )
    clauses.append(f"shares add up to the actual changes, to {short(removal.closure)} of them")
    if not removal.growth <= CHAOS:
        clauses.append(
            f"single shares mean little: differences grow {short(removal.growth)}-fold on their way through the steps"
        )
    return "; ".join(clauses)


def format_entry(entry: LedgerEntry, top: int) -> str:
    """Write one output at one point: predicted and actual change, and how that splits over examples and steps."""
    head = (
        f"{entry.split} {entry.number} (#{entry.point.index}, {entry.point.name}): {entry.output} = "
        f"{short(entry.before)}, without them {short(entry.before + entry.actual)}"
    )
    tables = (tabulate_changes(entry), tabulate_shares(entry).shortened(top), tabulate_steps(entry))
    return "\n\n".join([head, *map(format_text, tables)])


def tabulate_changes(entry: LedgerEntry) -> Table:
    """Give the change of the output that was predicted, and the one that came."""
    has_prediction = entry.predicted is not None
    columns = (
        Column("change", number=False),
        Column("value", heading="", number=has_prediction, spell=format_signed),
    )
    rows = (
        ("predicted", entry.predicted if has_prediction else NOT_COMPUTED),
        ("actual", entry.actual),
        ("shares cancel", f"{short(entry.cancellation)}×"),
    )
    return Table(columns, rows)


def tabulate_shares(entry: LedgerEntry) -> Table:
    """Give the shares of the examples that were left out, the largest first."""
    mass = float(np.abs(entry.shares).sum()) or 1.0
    columns = (
        Column("left out", number=False),
        Column("target" if entry.examples[0].text is None else "holds", number=False),
        Column("share", spell=format_signed, adds=True),
        Column("of all shares", spell=percent, adds=True),
    )
    rows = []
    for k in np.argsort(-np.abs(entry.shares), kind="stable").tolist():
        one, share = entry.examples[k], float(entry.shares[k])
        # by its place and its number in the source, or by its own name, as the contributions do
        named = (
            (f"{entry.places[k]} (#{one.index})", one.name)
            if one.text is None
            else (one.name, fitting(one.text))
        )
        rows.append((*named, share, abs(share) / mass))
    return Table(columns, tuple(rows))


def tabulate_steps(entry: LedgerEntry) -> Table:
    """Give when the change was made, in a few stretches of steps."""
    count = len(entry.by_step)
    edges = sorted({round(k * count / STRETCHES) for k in range(STRETCHES + 1)})
    rows = [
        (f"{first}–{last - 1}", float(entry.by_step[first:last].sum()))
        for first, last in pairwise(edges)
    ]
    return Table((Column("steps", number=False), Column("share", spell=format_signed)), tuple(rows))
