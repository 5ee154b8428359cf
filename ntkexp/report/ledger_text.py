"""Ledgers as a reader sees them: lines on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ntkexp.records.removal import Removal
from ntkexp.report.effects import NOT_COMPUTED
from ntkexp.report.examples import Example
from ntkexp.report.explain_text import fitting, signed
from ntkexp.report.leave_out import Agreement
from ntkexp.report.ledger import LedgerEntry
from ntkexp.text import aligned, counted, percent, short

STRETCHES = 10
CHAOS = 1e3  # of the growth of the sweep: beyond it, single shares are those of rounding and of chance


def ledger_told(
    entries: Sequence[LedgerEntry], found: Removal, agreement: Agreement | None, top: int, order: str = ""
) -> str:
    """Tell what leaving the group out changed: first of all points, then of each; `order` put some at its top."""
    notes = ([] if agreement is None else [agreement.sentence]) + of_sums(entries, len(found.example))
    return "\n\n".join([head(found, order), *notes, *(entry_told(entry, top) for entry in entries)]) + "\n"


def of_sums(entries: Sequence[LedgerEntry], count: int) -> list[str]:
    """Say what is predicted of several examples: they act on one another, which no sum of their effects knows."""
    if count == 1 or all(entry.predicted is None for entry in entries):
        return []
    return [
        f"predicted: the sum of {count} effects, each of leaving out one example alone; effects of a group do not add, "
        "so this is not the effect of the group, however well those of single examples are predicted; actual is"
    ]


def head(found: Removal, order: str = "") -> str:
    """Say what was done, and how well it is known."""
    group = counted(len(found.example), "example") + f" (at the top: those {order})" * bool(order)
    said = [f"trained again without {group}, from the same start, in the same order, for as many steps"]
    if found.emptied:
        steps = counted(found.emptied, "step")
        said.append(f"in {steps} nothing was left of the batch: memory and decay alone moved the weights")
    said.append(f"shares add up to the actual changes, to {short(found.closure)} of them")
    if not found.growth <= CHAOS:
        said.append(
            f"single shares mean little: differences grow {short(found.growth)}-fold on their way through the steps"
        )
    return "; ".join(said)


def entry_told(entry: LedgerEntry, top: int) -> str:
    """Tell one output at one point: predicted and actual change, and how that splits."""
    head = (
        f"{entry.split} {entry.number} (#{entry.point.index}, {entry.point.name}): {entry.output} = "
        f"{short(entry.before)}, without them {short(entry.before + entry.actual)}"
    )
    rows = [
        ("predicted", NOT_COMPUTED if entry.predicted is None else signed(entry.predicted)),
        ("actual", signed(entry.actual)),
        ("shares cancel", f"{short(entry.cancellation)}×"),
    ]
    changes = aligned(("change", ""), rows, (False, entry.predicted is not None))
    return f"{head}\n\n{changes}\n\n{shares(entry, top)}\n\n{steps(entry)}"


def shares(entry: LedgerEntry, top: int) -> str:
    """Tabulate the shares of the examples that were left out, the largest first."""
    order = np.argsort(-np.abs(entry.shares), kind="stable")
    mass = float(np.abs(entry.shares).sum()) or 1.0
    rows = [
        (*left_out(entry.places[k], entry.examples[k]), signed(float(entry.shares[k])),
         percent(abs(float(entry.shares[k])) / mass))
        for k in order[:top]
    ]  # fmt: skip
    named = "target" if entry.examples[0].text is None else "holds"
    if len(rest := entry.shares[order[top:]]):
        others = counted(len(rest), "other")
        rows.append((others, "", signed(float(rest.sum())), percent(float(np.abs(rest).sum()) / mass)))
    return aligned(("left out", named, "share", "of all shares"), rows, (False, False, True, True))


def left_out(place: int, example: Example) -> tuple[str, str]:
    """Name an example by its place and its number in the source, or by its own name, as the contributions do."""
    if example.text is None:
        return f"{place} (#{example.index})", example.name
    return example.name, fitting(example.text)


def steps(entry: LedgerEntry) -> str:
    """Tabulate when the change was made, in a few stretches of steps."""
    count = len(entry.by_step)
    edges = sorted({round(k * count / STRETCHES) for k in range(STRETCHES + 1)})
    rows = [(f"{first}–{last - 1}", signed(float(entry.by_step[first:last].sum()))) for first, last in pairwise(edges)]
    return aligned(("steps", "share"), rows, (False, True))
