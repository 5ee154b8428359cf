"""The comparison of all kernel machines with the trained network, on every split.

relative error   ‖f̂ − f_T‖ / ‖f_T − f_0‖ over all points and outputs of the split
floor            100 eps · size / ‖f_T − f_0‖, the relative error that rounding explains; `size` is ‖f_0‖ + ‖f_T‖.
                 If f is a difference of two networks (`init.antisymmetric` or `centred`), `size` sums the norms
                 of the terms.
agreement        share of points with the same label: the largest output, or the sign of a single output
r²               1 − ‖f̂ − f_T‖² / ‖f_T − mean f_T‖²

f̂ is the prediction of a kernel machine, and f_0 and f_T are the outputs of the network
before and after training. If the run explains a measure g of the outputs, or if a kernel
machine has a measure g, then g(f̂), g(f_T) and g(f_0) replace f̂, f_T and f_0, and there
is no agreement."""

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
from ntkexp.machine.base import AbstractMachine, DoesNotApply, Prediction, RunMatrices
from ntkexp.machine.machines import path_sum, without_machine
from ntkexp.mistake import first_line
from ntkexp.records.results import Result, at_points, rounding_floor


class Ladder(Component):
    """The kernel machines that are compared with the network.

    If the run uses a path rule that has no kernel machine of the same name, such as a
    rule of the user, the comparison has an extra row for it."""

    machine: tuple[AbstractMachine, ...]

    def predict_all(self, matrices: RunMatrices) -> list[MachineOutcome]:
        """Return the prediction of every kernel machine,
        or the reason why there is none."""
        tried = [
            try_machine(machine.option, machine.predict, matrices, machine.control)
            for machine in self.machine
        ]
        sums = [
            try_machine(rule, partial(path_sum, rule), matrices)
            for rule in without_machine(matrices.paths)
        ]
        return tried + sums


@dataclass(frozen=True)
class MachineOutcome:
    """One row of the comparison: the prediction of a kernel machine,
    or the reason why there is none."""

    name: str
    outcome: Prediction | DoesNotApply
    seconds: float
    control: bool = False


@dataclass(frozen=True)
class Region:
    """The points of a split, and norms that bound the rounding errors there."""

    points: slice
    # norms of the terms that add up to f, at each point
    norms: Float[Tensor, "term point"]


def try_machine(
    name: str,
    predict: Callable[[RunMatrices], Prediction],
    matrices: RunMatrices,
    control: bool = False,
) -> MachineOutcome:
    start = time.perf_counter()
    outcome: Prediction | DoesNotApply
    try:
        outcome = measured(predict(matrices), matrices)
    except DoesNotApply as reason:
        outcome = reason
    except LinAlgError as error:
        outcome = DoesNotApply(f"linear algebra failed ({first_line(error)})")
    return MachineOutcome(name, outcome, time.perf_counter() - start, control)


def measured(prediction: Prediction, matrices: RunMatrices) -> Prediction:
    """If the run has a measure g, replace the predicted outputs by g of the outputs.

    If the run explains a measure, path sums already predict it.
    """
    g = prediction.measure or matrices.measured
    if g is None:
        return prediction
    outputs = prediction.outputs
    remark = f"error in the {g.name.replace('_', '-')}"
    if not prediction.is_path_sum or prediction.measure is not None:
        outputs = g(outputs)
        remark = f"{remark} of its outputs"
    note = f"{prediction.note}; {remark}" if prediction.note else remark
    return replace(prediction, outputs=outputs, note=note, measure=g)


def comparison_rows(
    outcomes: list[MachineOutcome],
    regions: Mapping[str, Region],
    matrices: RunMatrices,
    classifies: bool,
) -> list[Result]:
    rows = []
    for outcome in outcomes:
        for split, region in regions.items():
            row = compare_on_split(split, outcome, region, matrices, classifies)
            rows.append(replace(row, control=outcome.control))
    return rows


def compare_on_split(
    split: str,
    machine: MachineOutcome,
    region: Region,
    matrices: RunMatrices,
    classifies: bool,
) -> Result:
    """Return the errors of one kernel machine on one split,
    or the reason why there are none."""
    outcome = machine.outcome
    if isinstance(outcome, DoesNotApply):
        return Result(split, machine.name, note=str(outcome))
    attributed = matrices.attributed[region.points]
    if not outcome.is_path_sum:
        attributed = attributed | True
    if not attributed.any():
        return Result(
            split,
            machine.name,
            note="none of these points is attributed: raise path.attributed",
        )
    compared = compared_values(outcome, region, matrices, attributed)
    end = compared.end
    error = compared.predicted - end
    missed = float(error.norm())
    moved = float((end - compared.start).norm())
    spread = float((end - end.mean(0)).square().sum())
    agreement = None
    names_classes = classifies and compared.outputs is None and outcome.measure is None
    if names_classes and error.isfinite().all():
        same_label = predicted_label(end + error) == predicted_label(end)
        agreement = float(same_label.double().mean())

    note = "the network did not move here"
    if moved:
        note = remarks_on(outcome, attributed, compared.outputs)
    return Result(
        split,
        machine.name,
        outcome.detail,
        relative_error=missed / moved if moved else None,
        floor=rounding_floor(compared.size, moved, torch.finfo(end.dtype).eps),
        max_error=float(error.abs().max()),
        agreement=agreement,
        r2=1 - missed**2 / spread if spread else None,
        note=note,
    )


def remarks_on(
    prediction: Prediction,
    attributed: Bool[Tensor, " point"],
    outputs: Sequence[int] | None,
) -> str:
    """Return the note of a prediction, with the points and outputs that it has if it
    does not have all."""
    remarks = [prediction.note]
    if not attributed.all():
        remarks.append(at_points(int(attributed.sum()), len(attributed)))
    if outputs is not None:
        plural = "s" if len(outputs) > 1 else ""
        remarks.append(f"at output{plural} {', '.join(map(str, outputs))}")
    return "; ".join(filter(None, remarks))


@dataclass(frozen=True)
class ComparedValues:
    """f_0, f_T and f̂, or their measures, at the compared points and outputs."""

    start: Float[Tensor, "point out"]
    end: Float[Tensor, "point out"]
    predicted: Float[Tensor, "point out"]
    size: float  # Σ‖terms‖, which determines the rounding error
    outputs: Sequence[int] | None  # the compared outputs, or None for all


def compared_values(
    outcome: Prediction,
    region: Region,
    matrices: RunMatrices,
    attributed: Bool[Tensor, " point"],
) -> ComparedValues:
    """Return the values at the points and outputs that have a prediction.

    If the prediction is one of a measure g of the outputs, return g(f_0) and g(f_T), and
    multiply the rounding errors by the slope of g."""
    g = outcome.measure
    start = matrices.start
    end = matrices.end
    norms = region.norms
    if g is not None:
        slopes = torch.maximum(g.slopes(start), g.slopes(end))
        norms = norms * slopes[region.points]
        start = g(start)
        end = g(end)
    outputs = list(range(end.shape[1]))
    if outcome.is_path_sum and g is matrices.measured:
        outputs = list(matrices.integrated)
    has_all_outputs = len(outputs) == end.shape[1]

    def selected(values: Float[Tensor, "query out"]) -> Float[Tensor, "_ _"]:
        return values[region.points][attributed][:, outputs]

    return ComparedValues(
        start=selected(start),
        end=selected(end),
        predicted=selected(outcome.outputs),
        size=float(norms[:, attributed].norm(dim=1).sum()),
        outputs=None if has_all_outputs else outputs,
    )


def predicted_label(
    outputs: Float[Tensor, "query out"],
) -> Tensor | Bool[Tensor, " query"]:
    """Return the class of the largest output, or the sign of a single output."""
    return outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
