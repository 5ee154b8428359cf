"""The breakdown of a removal, as numbers and as text.

The network was retrained without a group of examples. For each output at each query,
the breakdown divides the change among the examples of the group, and among the steps.
"""

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
from ntkexp.report.explain import on_one_line
from ntkexp.report.known_effects import effects_of_run
from ntkexp.report.leave_out import MAX_GROWTH, Agreement
from ntkexp.report.parts import strongest_first
from ntkexp.report.run import Run, outputs_of
from ntkexp.report.tables import (
    Column,
    Table,
    format_signed,
    format_text,
    signed_column,
    text_column,
)
from ntkexp.text import counted, percent, short

Array: TypeAlias = NDArray[np.float64]

NOT_COMPUTED = "not computed: path.effects=true"
# the table of steps has one row for each of this many intervals of steps
STRETCHES_OF_STEPS = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class BreakdownEntry:
    """The breakdown for one output at one query: the output before and after retraining
    without the group of examples, and the shares of examples and steps."""

    split: str
    number: int  # index of the query in the split
    point: Example
    out: int
    output: str
    before: float
    # predicted change of the output: the sum of the leave-out effects of single
    # examples
    predicted: float | None
    actual: float
    places: tuple[int, ...]  # indices of the left-out training examples
    names: tuple[str, ...]
    examples: tuple[Example, ...]
    shares: Array  # the part of `actual` due to each example, [example]
    by_step: Array
    cancellation: float  # Σ|s|/|Σs| over the shares s
    growth: float  # growth of the adjoint in the backward pass

    @property
    def as_json(self) -> dict[str, Json]:
        shares = zip(self.names, self.shares.tolist(), strict=True)
        return {
            "split": self.split,
            "point": self.number,
            "out": self.out,
            "predicted": self.predicted,
            "actual": self.actual,
            "shares": dict(shares),
            "places": self.places,
            "by_step": self.by_step.tolist(),
            "cancellation": self.cancellation,
            "growth": self.growth,
        }


def breakdown_entries(
    run: Run, split: str, numbers: list[int], removal: Removal
) -> list[BreakdownEntry]:
    """Return an entry for each output of each query of the removal."""
    before = outputs_of(run, "f_T")
    effects = effects_of_run(run)
    group = list(removal.example)
    names = example_names(run)
    entries = []
    for row, (number, query) in enumerate(zip(numbers, removal.query, strict=True)):
        for column, out in enumerate(removal.out):
            entry = BreakdownEntry(
                split=split,
                number=number,
                point=example(run, split, number),
                out=out,
                output=output_name(run, out, before.shape[1]),
                before=float(before[query, out]),
                predicted=predicted_change(run, effects, query, out, group),
                actual=float(removal.actual[row, column]),
                places=removal.example,
                names=tuple(names[i] for i in group),
                examples=tuple(example(run, "train", i) for i in group),
                shares=removal.shares[row, column],
                by_step=removal.by_step[row, column],
                cancellation=float(removal.cancellation[row, column]),
                growth=removal.growth,
            )
            entries.append(entry)
    return entries


def predicted_change(
    run: Run, effects: Array | None, query: int, out: int, group: list[int]
) -> float | None:
    """Return the sum of the leave-out effects of the group's examples. Return None if
    one of these effects is unknown."""
    if effects is None or out not in run.outs:
        return None
    change = float(effects[query, run.outs.index(out), group].sum())
    if np.isfinite(change):
        return change
    return None


# --- Breakdowns on a terminal.


def format_breakdown(
    entries: Sequence[BreakdownEntry],
    removal: Removal,
    agreement: Agreement | None,
    top: int,
    order: str,
) -> str:
    """Format the removal and the breakdown of each output as text.

    If `top:N` chose the group, `order` describes the ranking. Otherwise it is empty.
    """
    blocks = [breakdown_heading(removal, order)]
    if agreement is not None:
        blocks.append(agreement.sentence)
    if len(removal.example) > 1 and any(
        entry.predicted is not None for entry in entries
    ):
        blocks.append(
            f"predicted: the sum of the {len(removal.example)} effects of single examples; the "
            "actual change differs from this sum, because the examples interact"
        )
    blocks += [format_entry(entry, top) for entry in entries]
    return "\n\n".join(blocks) + "\n"


def breakdown_heading(removal: Removal, order: str) -> str:
    """Describe the retraining and the accuracy of the breakdown in one sentence."""
    group = counted(len(removal.example), "example")
    if order:
        group += f" (at the top: those {order})"
    clauses = [
        f"trained again without {group}, from the same start, in the same order, for as many steps"
    ]
    if removal.emptied:
        steps = counted(removal.emptied, "step")
        clauses.append(
            f"in {steps} the batch was empty: only momentum and decay changed the weights"
        )
    clauses.append(
        f"shares add up to the actual changes, with the relative error {short(removal.closure)}"
    )
    if not removal.growth <= MAX_GROWTH:
        clauses.append(
            f"single shares mean little: differences grow {short(removal.growth)}-fold "
            "over the steps"
        )
    return "; ".join(clauses)


def format_entry(entry: BreakdownEntry, top: int) -> str:
    """Format one entry as tables: predicted and actual change,
    shares of examples and steps."""
    head = (
        f"{entry.split} {entry.number} (#{entry.point.index}, {entry.point.name}): {entry.output} = "
        f"{short(entry.before)}, without them {short(entry.before + entry.actual)}"
    )
    tables = (
        tabulate_changes(entry),
        tabulate_shares(entry).shortened(top),
        tabulate_steps(entry),
    )
    return "\n\n".join([head, *map(format_text, tables)])


def tabulate_changes(entry: BreakdownEntry) -> Table:
    """Tabulate the predicted change, the actual change,
    and how strongly the shares cancel."""
    has_prediction = entry.predicted is not None
    columns = (
        text_column("change"),
        Column("value", heading="", number=has_prediction, spell=format_signed),
    )
    rows = (
        ("predicted", entry.predicted if has_prediction else NOT_COMPUTED),
        ("actual", entry.actual),
        ("shares cancel", f"{short(entry.cancellation)}×"),
    )
    return Table(columns, rows)


def tabulate_shares(entry: BreakdownEntry) -> Table:
    """Return a row for each example of the group, the strongest first."""
    mass = float(np.abs(entry.shares).sum()) or 1.0
    columns = (
        text_column("left out"),
        text_column("target" if entry.examples[0].text is None else "holds"),
        signed_column("share"),
        Column("of all shares", spell=percent, adds=True),
    )
    rows = []
    for k in strongest_first(entry.shares):
        left_out = entry.examples[k]
        share = float(entry.shares[k])
        # Examples of a followed loop have an id and a text. Examples of a run have an
        # index in the data source, and a target.
        if left_out.text is None:
            names = (f"{entry.places[k]} (#{left_out.index})", left_out.name)
        else:
            names = (left_out.name, on_one_line(left_out.text))
        rows.append((*names, share, abs(share) / mass))
    return Table(columns, tuple(rows))


def tabulate_steps(entry: BreakdownEntry) -> Table:
    """Sum the shares of the steps over `STRETCHES_OF_STEPS` intervals
    of about equal length."""
    steps = len(entry.by_step)
    edges = sorted(
        {round(k * steps / STRETCHES_OF_STEPS) for k in range(STRETCHES_OF_STEPS + 1)}
    )
    rows = [
        (f"{first}–{last - 1}", float(entry.by_step[first:last].sum()))
        for first, last in pairwise(edges)
    ]
    return Table(
        (text_column("steps"), Column("share", spell=format_signed)), tuple(rows)
    )
