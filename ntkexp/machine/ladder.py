"""The ladder: every machine beside the trained network, on every split.

relative error   ‖f̂ − f_T‖ / ‖f_T − f_0‖ over all points and outputs of the split
floor            100 eps · size / ‖f_T − f_0‖, what rounding alone explains: `size` is ‖f_0‖ + ‖f_T‖, or the norms
                 of the terms of which f is a difference
agreement        share of points with the same label: the largest output, or the sign of a single one
r²               1 − ‖f̂ − f_T‖² / ‖f_T − mean f_T‖²
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, and not listed

from ntkexp.component import Component
from ntkexp.machine.base import AbstractMachine, DoesNotApply, Evidence, Prediction
from ntkexp.machine.machines import path_sum, without_machine
from ntkexp.mistake import first_line
from ntkexp.records.results import Result, at_points


class Ladder(Component):
    """Which machines are tried; below them, the sums by rules that no machine is called after."""

    machine: tuple[AbstractMachine, ...]

    def climb(self, evidence: Evidence) -> list[Rung]:
        """Every machine's prediction, or why it has none."""
        tried = [rung_of(machine.option, machine.predict, evidence, machine.control) for machine in self.machine]
        sums = [rung_of(rule, partial(path_sum, rule), evidence) for rule in without_machine(evidence.paths)]
        return tried + sums


@dataclass(frozen=True)
class Rung:
    """One machine led to this outcome, and took so long."""

    name: str
    outcome: Prediction | DoesNotApply
    seconds: float
    control: bool = False


@dataclass(frozen=True)
class Region:
    """Where the points of a split are, and the norms at each of what rounds there."""

    points: slice
    norms: Float[Tensor, "term point"]

    def size(self, among: Tensor) -> float:
        """Σ‖terms‖ over some of the points."""
        return float(self.norms[:, among].norm(dim=1).sum())


def rung_of(name: str, predict: Callable[[Evidence], Prediction], evidence: Evidence, control: bool = False) -> Rung:
    """Try one machine."""
    start = time.perf_counter()
    outcome: Prediction | DoesNotApply
    try:
        outcome = predict(evidence)
    except DoesNotApply as reason:
        outcome = reason
    except LinAlgError as error:
        outcome = DoesNotApply(f"its linear algebra failed ({first_line(error)})")
    return Rung(name, outcome, time.perf_counter() - start, control)


def results(rungs: list[Rung], places: Mapping[str, Region], evidence: Evidence, classifies: bool) -> list[Result]:
    """The table, machine by machine."""
    return [
        replace(row(split, rung, place, evidence, classifies), control=rung.control)
        for rung in rungs
        for split, place in places.items()
    ]


def row(split: str, rung: Rung, place: Region, evidence: Evidence, classifies: bool) -> Result:
    """Compare one machine on one split."""
    if isinstance(rung.outcome, DoesNotApply):
        return Result(split, rung.name, note=str(rung.outcome))
    known = evidence.attributed[place.points] if rung.outcome.partial else evidence.attributed[place.points] | True
    if not known.any():
        return Result(split, rung.name, note="none of these points is attributed: raise path.attributed")
    outputs = list(evidence.integrated if rung.outcome.partial else range(evidence.end.shape[1]))
    around = (evidence.start, evidence.end, rung.outcome.outputs)
    start, end, said = (f[place.points][known][:, outputs] for f in around)
    error = said - end
    moved, whole = float((end - start).norm()), len(outputs) == evidence.end.shape[1]
    spread = float((end - end.mean(0)).square().sum())
    missed = float(error.norm())
    eps = torch.finfo(end.dtype).eps
    return Result(
        split,
        rung.name,
        rung.outcome.detail,
        relative_error=missed / moved if moved else None,
        floor=100 * eps * place.size(known) / moved if moved else None,
        max_error=float(error.abs().max()),
        agreement=float((label(end + error) == label(end)).double().mean()) if classifies and whole else None,
        r2=1 - missed**2 / spread if spread else None,
        note=note_of(rung.outcome.note, known, () if whole else outputs) if moved else "the network did not move here",
    )


def note_of(note: str, known: Bool[Tensor, " point"], outputs: Sequence[int]) -> str:
    """A note, and where a row was measured: at how many points, and at which outputs, if not at all."""
    share = "" if known.all() else at_points(int(known.sum()), len(known))
    those = f"at output{'s' if len(outputs) > 1 else ''} {', '.join(map(str, outputs))}" if outputs else ""
    return "; ".join(part for part in (note, share, those) if part)


def label(outputs: Float[Tensor, "probe out"]) -> Tensor | Bool[Tensor, " probe"]:
    """Find the class that outputs speak for."""
    return outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
