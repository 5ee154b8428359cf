"""The ladder: every machine beside the trained network, on every split.

relative error   ‖f̂ − f_T‖ / ‖f_T − f_0‖ over all points and outputs of the split
floor            100 eps · size / ‖f_T − f_0‖, what rounding alone explains: `size` is ‖f_0‖ + ‖f_T‖, or the norms
                 of the terms of which f is a difference
agreement        share of points with the same label: the largest output, or the sign of a single one
r²               1 − ‖f̂ − f_T‖² / ‖f_T − mean f_T‖²

Where the path was integrated of a measure g, or a machine has one, all of this is of g(f̂), g(f_T) and g(f_0), and
there is no agreement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
from ntkexp.records.results import Result, at_points, rounding_floor


class Ladder(Component):
    """Which machines are tried; below them, one row for each path rule that has no machine of its name."""

    machine: tuple[AbstractMachine, ...]

    def climb(self, evidence: Evidence) -> list[Rung]:
        """Every machine's prediction, or why it has none."""
        tried = [
            try_machine(machine.option, machine.predict, evidence, machine.control)
            for machine in self.machine
        ]
        sums = [
            try_machine(rule, partial(path_sum, rule), evidence)
            for rule in without_machine(evidence.paths)
        ]
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


def try_machine(
    name: str, predict: Callable[[Evidence], Prediction], evidence: Evidence, control: bool = False
) -> Rung:
    start = time.perf_counter()
    outcome: Prediction | DoesNotApply
    try:
        outcome = measured(predict(evidence), evidence)
    except DoesNotApply as reason:
        outcome = reason
    except LinAlgError as error:
        outcome = DoesNotApply(f"linear algebra failed ({first_line(error)})")
    return Rung(name, outcome, time.perf_counter() - start, control)


def measured(prediction: Prediction, evidence: Evidence) -> Prediction:
    """The prediction of what is compared: as it is, or a measure g of the outputs that a machine predicts.

    A sum along a path that was integrated of a measure predicts that already.
    """
    g = prediction.through or evidence.measured
    if g is None:
        return prediction
    is_of_measure = prediction.partial and prediction.through is None
    outputs = prediction.outputs if is_of_measure else g(prediction.outputs)
    what = f"error in the {g.name.replace('_', '-')}{'' if is_of_measure else ' of its outputs'}"
    note = f"{prediction.note}; {what}" if prediction.note else what
    return replace(prediction, outputs=outputs, note=note, through=g)


def ladder_rows(
    rungs: list[Rung], regions: Mapping[str, Region], evidence: Evidence, classifies: bool
) -> list[Result]:
    return [
        replace(compare_on_split(split, rung, region, evidence, classifies), control=rung.control)
        for rung in rungs
        for split, region in regions.items()
    ]


def compare_on_split(
    split: str, rung: Rung, region: Region, evidence: Evidence, classifies: bool
) -> Result:
    outcome = rung.outcome
    if isinstance(outcome, DoesNotApply):
        return Result(split, rung.name, note=str(outcome))
    attributed = evidence.attributed[region.points]
    if not outcome.partial:
        attributed = attributed | True
    if not attributed.any():
        return Result(
            split, rung.name, note="none of these points is attributed: raise path.attributed"
        )
    # What is compared: outputs, or a measure of them, whose slope multiplies what rounds.
    g, norms, around = outcome.through, region.norms, (evidence.start, evidence.end)
    if g is not None:
        slopes = torch.maximum(*map(g.slopes, around))
        norms, around = norms * slopes[region.points], (g(evidence.start), g(evidence.end))
    partial = outcome.partial and g is evidence.measured
    outputs = list(evidence.integrated if partial else range(around[1].shape[1]))
    start, end, predicted = (
        f[region.points][attributed][:, outputs] for f in (*around, outcome.outputs)
    )
    error = predicted - end
    missed, moved = float(error.norm()), float((end - start).norm())
    spread = float((end - end.mean(0)).square().sum())
    size = float(norms[:, attributed].norm(dim=1).sum())  # Σ‖terms‖ that round
    # Where it was measured, if not everywhere: at how many points, and at which outputs.
    whole = len(outputs) == around[1].shape[1]
    share = "" if attributed.all() else at_points(int(attributed.sum()), len(attributed))
    those = (
        ""
        if whole
        else f"at output{'s' if len(outputs) > 1 else ''} {', '.join(map(str, outputs))}"
    )
    note = "; ".join(part for part in (outcome.note, share, those) if part)
    return Result(
        split,
        rung.name,
        outcome.detail,
        relative_error=missed / moved if moved else None,
        floor=rounding_floor(size, moved, torch.finfo(end.dtype).eps),
        max_error=float(error.abs().max()),
        agreement=float((predicted_label(end + error) == predicted_label(end)).double().mean())
        if classifies and whole and g is None
        else None,
        r2=1 - missed**2 / spread if spread else None,
        note=note if moved else "the network did not move here",
    )


def predicted_label(outputs: Float[Tensor, "probe out"]) -> Tensor | Bool[Tensor, " probe"]:
    """The class of the largest output, or the sign of a single one."""
    return outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
