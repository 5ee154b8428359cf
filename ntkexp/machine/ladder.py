"""The comparison of all kernel machines with the trained network, on every split.

relative error   ‖f̂ − f_T‖ / ‖f_T − f_0‖ over all points and outputs of the split
floor            100 eps · size / ‖f_T − f_0‖, the error that rounding explains; `size` is ‖f_0‖ + ‖f_T‖, or the sum
                 of the norms of the terms, if f is a difference
agreement        share of points with the same label: the largest output, or the sign of a single output
r²               1 − ‖f̂ − f_T‖² / ‖f_T − mean f_T‖²

If the run integrates the path of a measure g, or if a kernel machine has a measure g, the errors
compare g(f̂) with g(f_T) and g(f_0), and there is no agreement.
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
    """The kernel machines that are compared with the network.

    If no kernel machine has the name of a path rule, as for a user's rule, the comparison has an
    extra row for this rule.
    """

    machine: tuple[AbstractMachine, ...]

    def climb(self, evidence: Evidence) -> list[Rung]:
        """Return the prediction of every kernel machine, or the reason why there is none."""
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
    """One row of the comparison: the prediction of a kernel machine, or the reason why there is
    none.
    """

    name: str
    outcome: Prediction | DoesNotApply
    seconds: float
    control: bool = False


@dataclass(frozen=True)
class Region:
    """A split: its points, and the norms that determine the size of rounding errors."""

    points: slice
    norms: Float[Tensor, "term point"]  # norms of the terms that add up to f, at each point


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
    """Replace the predicted outputs by their measure g, if there is one.

    If the path of a measure was integrated, path sums already predict the measure.
    """
    g = prediction.through or evidence.measured
    if g is None:
        return prediction
    outputs = prediction.outputs
    remark = f"error in the {g.name.replace('_', '-')}"
    if not prediction.partial or prediction.through is not None:
        outputs = g(outputs)
        remark = f"{remark} of its outputs"
    note = f"{prediction.note}; {remark}" if prediction.note else remark
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
    """Return the errors of one kernel machine on one split, or the reason why there are none."""
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
    # f_0 and f_T, or their measure g; the slope of g multiplies the rounding errors
    g = outcome.through
    start_of_all = evidence.start
    end_of_all = evidence.end
    norms = region.norms
    if g is not None:
        slopes = torch.maximum(g.slopes(evidence.start), g.slopes(evidence.end))
        norms = norms * slopes[region.points]
        start_of_all = g(evidence.start)
        end_of_all = g(evidence.end)

    # Select the points and outputs that have a prediction.
    outputs = list(range(end_of_all.shape[1]))
    if outcome.partial and g is evidence.measured:
        outputs = list(evidence.integrated)
    has_all_outputs = len(outputs) == end_of_all.shape[1]
    start, end, predicted = (
        f[region.points][attributed][:, outputs]
        for f in (start_of_all, end_of_all, outcome.outputs)
    )

    error = predicted - end
    missed = float(error.norm())
    moved = float((end - start).norm())
    spread = float((end - end.mean(0)).square().sum())
    # Σ‖terms‖, which determines the rounding error
    size = float(norms[:, attributed].norm(dim=1).sum())
    agreement = None
    if classifies and has_all_outputs and g is None:
        same_label = predicted_label(end + error) == predicted_label(end)
        agreement = float(same_label.double().mean())

    remarks = [outcome.note]
    if not attributed.all():
        remarks.append(at_points(int(attributed.sum()), len(attributed)))
    if not has_all_outputs:
        plural = "s" if len(outputs) > 1 else ""
        remarks.append(f"at output{plural} {', '.join(map(str, outputs))}")
    return Result(
        split,
        rung.name,
        outcome.detail,
        relative_error=missed / moved if moved else None,
        floor=rounding_floor(size, moved, torch.finfo(end.dtype).eps),
        max_error=float(error.abs().max()),
        agreement=agreement,
        r2=1 - missed**2 / spread if spread else None,
        note="; ".join(filter(None, remarks)) if moved else "the network did not move here",
    )


def predicted_label(outputs: Float[Tensor, "query out"]) -> Tensor | Bool[Tensor, " query"]:
    """Return the class of the largest output, or the sign of a single output."""
    return outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
