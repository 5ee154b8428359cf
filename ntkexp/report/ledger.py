"""The ledger of a removal as a reader sees it: for every point and output what was predicted, what came, and shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.json_file import Json
from ntkexp.records.removal import Removal
from ntkexp.report.effects import effects
from ntkexp.report.examples import Example, example, output_name
from ntkexp.report.explain import outputs_of
from ntkexp.report.group import example_names
from ntkexp.report.run import Run

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
