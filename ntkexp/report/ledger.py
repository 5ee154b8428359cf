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
from ntkexp.report.explain import NOT_COMPUTED, effects, fitting, outputs_of, signed
from ntkexp.report.leave_out import Agreement
from ntkexp.report.run import Run
from ntkexp.text import aligned, counted, percent, short

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
        """The entry as plain data."""
        return {
            "split": self.split,
            "point": self.number,
            "out": self.out,
            "predicted": self.predicted,
            "actual": self.actual,
            "shares": {name: float(share) for name, share in zip(self.names, self.shares, strict=True)},
            "places": self.places,
            "by_step": [float(share) for share in self.by_step],
            "cancellation": self.cancellation,
            "growth": self.growth,
        }


def entries(run: Run, split: str, numbers: list[int], found: Removal) -> list[LedgerEntry]:
    """Put the removal in words of the run: an entry for each point, and each output there."""
    known, names, before = effects(run), example_names(run), outputs_of(run, "f_T")
    group = list(found.example)
    made = []
    for row, (number, k) in enumerate(zip(numbers, found.probe, strict=True)):
        for column, out in enumerate(found.out):
            predicted = None if known is None or out not in run.outs else known[k, run.outs.index(out), group].sum()
            made.append(
                LedgerEntry(
                    split=split,
                    number=number,
                    point=example(run, split, number),
                    out=out,
                    output=output_name(run, out, before.shape[1]),
                    before=float(before[k, out]),
                    predicted=float(predicted) if predicted is not None and np.isfinite(predicted) else None,
                    actual=float(found.actual[row, column]),
                    places=found.example,
                    names=tuple(names[i] for i in group),
                    examples=tuple(example(run, "train", i) for i in group),
                    shares=found.shares[row, column],
                    by_step=found.by_step[row, column],
                    cancellation=float(found.cancellation[row, column]),
                    growth=found.growth,
                )
            )
    return made


# --- Ledgers as a reader sees them: lines on a terminal.


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
