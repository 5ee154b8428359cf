"""The metrics of a run, one row per step. Steps with a kernel snapshot have values in
more columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.machine.base import DoesNotApply
from ntkexp.machine.ladder import predicted_label
from ntkexp.model.functional import call_with
from ntkexp.path.integrals import Tally, scalars_to_cpu
from ntkexp.path.points import NetworkView, Points
from ntkexp.path.rule.base import AbstractRule
from ntkexp.path.step import Step
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights
from ntkexp.statistics import (
    MAX_DENSE_ROWS,
    TOP,
    activity,
    alignment,
    kernel_change,
    label_alignment,
    largest_kernel_eigenvalue,
    pattern,
    selectivity,
    spectrum,
)

Row: TypeAlias = dict[str, float | int | None]
"""The metrics of a step, by column."""


# --- Metrics of a kernel snapshot: kernel change, eigenvalues,
# and the stability of the step.


RESIDUAL_TOPS = (1, 5, 10)
KERNEL_COLUMNS = (
    "kernel_change",
    "alignment",
    "limit_distance",
    "limit_alignment",
    "label_alignment",
    "trace",
    "lambda_max",
    "condition",
    "effective_rank",
    *(f"eigenvalue_{k + 1}" for k in range(TOP)),
    *(f"residual_top_{k}" for k in RESIDUAL_TOPS),
    "stability",
    "pattern_change",
)
SELECTIVITY = "selectivity"


@dataclass(frozen=True)
class KernelObserver:
    """An observer that computes the metrics of kernel snapshots, such as the change
    since the kernel before training."""

    setting: Setting

    @property
    def columns(self) -> tuple[str, ...]:
        columns = list(KERNEL_COLUMNS)
        if self.setting.problem.phases:
            columns.append(SELECTIVITY)
        return tuple(columns)

    @cached_property
    def train_limit(self) -> Float[Tensor, "train kept train kept_"] | None:
        """K_∞ among the training examples, or None
        if the network has no known limit."""
        limit = self.setting.start.limit
        if isinstance(limit, DoesNotApply):
            return None
        outputs = self.setting.problem.outputs
        makes_kernels = self.setting.points.makes_kernels
        kernel = limit.of_all(outputs) if makes_kernels else limit.traced(outputs)
        return kernel[: self.setting.points.train]

    @cached_property
    def pattern(self) -> Bool[Tensor, " unit"]:
        """The activation pattern of the units at the training examples, before
        training."""
        return activation_pattern(self.setting.points, self.setting.problem.weights)

    def row(
        self,
        kernel: Float[Tensor, "point kept train kept_"],
        view: NetworkView,
        step: int,
        step_size: float | None,
    ) -> Row:
        """Return the metrics of a tangent kernel, or of its trace over outputs.

        λ_max is always the largest eigenvalue of the kernel, not of its trace.
        """
        setting = self.setting
        points = setting.points
        train_kernel = kernel[: points.train]
        start = setting.start.kernel[: points.train]
        targets = setting.problem.targets[: points.train]

        # the change of K_s since K_0, and the distance of K_s from K_∞
        changed = activation_pattern(points, view.weights) != self.pattern
        row: Row = {
            "kernel_change": kernel_change(train_kernel, start),
            "alignment": alignment(train_kernel, start),
            "label_alignment": label_alignment(train_kernel, targets),
            "trace": float(train_kernel.flatten(2).flatten(0, 1).trace()),
            "pattern_change": float(changed.double().mean()) if len(changed) else None,
        }
        limit = self.train_limit
        if limit is not None:
            row["limit_distance"] = kernel_change(train_kernel, limit)
            row["limit_alignment"] = alignment(train_kernel, limit)

        # the eigenvalues of the kernel
        row |= self.modes(train_kernel, view.train_outputs - targets)
        if not points.makes_kernels:
            row["lambda_max"] = view.largest_eigenvalue(slice(None))
        top = row["lambda_max"]
        if step_size is not None and top is not None:
            row["stability"] = self.stability(train_kernel, view, step, step_size, top)

        if setting.problem.phases:
            row[SELECTIVITY] = unit_selectivity(setting, view.weights)
        return row

    def stability(
        self,
        kernel: Float[Tensor, "train kept train kept_"],
        view: NetworkView,
        step: int,
        step_size: float,
        top: float,
    ) -> float:
        """Return η w λ_max ℓ″/2, which is below 1 if the step is stable.

        η is the step size, w the weight of an example, λ_max the largest eigenvalue of
        the kernel among the examples of the step, and ℓ″ the curvature of the loss.
        `top` is λ_max among all training examples."""
        descent = self.setting.descent
        points = self.setting.points
        weight = descent.weight(points.train)
        if self.setting.domain.switches:
            phase = descent.phase(step)
            weight = descent.weight(phase.count)
            if points.makes_kernels:
                own_kernel = kernel[phase.examples, :, phase.examples]
                top = largest_kernel_eigenvalue(own_kernel)
            else:
                top = view.largest_eigenvalue(phase.examples)
        return step_size * weight * top * self.setting.experiment.loss.curvature / 2

    def modes(
        self,
        kernel: Float[Tensor, "train kept train kept_"],
        residual: Float[Tensor, "train out"],
    ) -> Row:
        """Return the metrics of the eigenvalues. For a large kernel, return only λ_max.

        `residual_top_k` is the fraction of the residual in the span of the first k
        eigenvectors."""
        if not kernel.isfinite().all():
            return {"lambda_max": None}
        entries = kernel.shape[0] * kernel.shape[1]
        if entries > MAX_DENSE_ROWS:
            return {"lambda_max": largest_kernel_eigenvalue(kernel)}
        modes = spectrum(kernel)
        row: Row = {
            "lambda_max": float(modes.values[0]),
            "condition": modes.condition,
            "effective_rank": modes.effective_rank,
        }
        for k, value in enumerate(modes.values[:TOP]):
            row[f"eigenvalue_{k + 1}"] = float(value)
        for k in RESIDUAL_TOPS:
            row[f"residual_top_{k}"] = modes.share(residual.reshape(entries, -1), k)
        return row


def activation_pattern(points: Points, weights: Weights) -> Bool[Tensor, " unit"]:
    return torch.cat(
        [pattern(points.tape(weights, block)) for block in points.train_blocks]
    )


def unit_selectivity(setting: Setting, weights: Weights) -> float | None:
    """Return the selectivity of units for the phases of training, or None if it is
    undefined.

    The activity of the units is measured at the queries of each phase. If there are no
    queries, it is measured at the training examples of each phase."""
    module = setting.problem.module
    points = setting.points
    phases = setting.problem.phases
    deviations = []
    for phase in phases.get("query") or phases.get("train", ()):
        parts = torch.split(points.inputs[phase], points.block)
        activities = [
            activity(module.network, partial(call_with, module, weights, (part,)))
            for part in parts
        ]
        units = [part for part in activities if part is not None]
        # selectivity needs the standard deviation over at least two points
        if not units or phase.stop - phase.start < 2:
            return None
        deviations.append(torch.cat(units).std(0))
    return selectivity(deviations)


# --- The metrics of each step.


STEP_COLUMNS = (
    "step",
    "time",
    "step_size",
    "clipping",
    "loss",
    "accuracy",
    "loss_query",
    "accuracy_query",
    "weights_moved",
)
SHARE_COLUMNS = ("closure", "contribution_mass", "contribution_sum", "kernel_mass")


@dataclass(frozen=True)
class Observer:
    """An observer that computes the metrics of each step."""

    setting: Setting

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of metrics.csv."""
        layers = [f"weights_moved.{name}" for name in self.setting.problem.weights]
        phases = []
        if self.setting.problem.phases:
            phases.append("phase")
            phases += [
                f"{column}{name}"
                for column in ("loss", "accuracy")
                for name in self.tasks
            ]
        return (*STEP_COLUMNS, *phases, *layers, *SHARE_COLUMNS, *self.kernels.columns)

    @cached_property
    def kernels(self) -> KernelObserver:
        return KernelObserver(self.setting)

    def splits(self, step: int) -> dict[str, slice]:
        """Return slices of the training examples and of the queries. Each key is the
        suffix of the slice's columns: "" or "_query".

        If training has phases, these keys hold the slices of the present phase. Further
        keys with a phase number, such as "_query_1", hold the slices of each phase."""
        if self.setting.problem.phases:
            suffix = f"_{self.phase(step)}"
            current = {
                name.removesuffix(suffix): points
                for name, points in self.tasks.items()
                if name.endswith(suffix)
            }
            return current | self.tasks
        slices = {"": slice(0, self.setting.points.train)}
        queries = self.setting.problem.split_slices.get("query")
        if queries:
            slices["_query"] = queries
        return slices

    @cached_property
    def tasks(self) -> dict[str, slice]:
        """The slices of the training examples and of the queries of each phase, with
        keys such as "_1" and "_query_1"."""
        phases = self.setting.problem.phases
        by_split = {"": phases.get("train", ()), "_query": phases.get("query", ())}
        return {
            f"{name}_{number}": points
            for name, slices in by_split.items()
            for number, points in enumerate(slices, start=1)
            if points.stop > points.start
        }

    def phase(self, step: int) -> int:
        return self.setting.descent.phases.index(self.setting.descent.phase(step)) + 1

    def loss(self, outputs: Float[Tensor, "point out"], step: int) -> float:
        points = self.splits(step)[""]
        return self.objective(float(self.summed_loss(outputs, points)), points)

    def summed_loss(
        self, outputs: Float[Tensor, "point out"], points: slice
    ) -> Float[Tensor, ""]:
        """Return the sum of the losses over a slice of the points."""
        losses = self.setting.experiment.loss.value(
            outputs[points], self.setting.problem.targets[points]
        )
        return losses.sum()

    def objective(self, summed: float, points: slice) -> float:
        """Return the objective: the sum of the losses, times the weight of an example,
        times the scale of the loss."""
        weight = self.setting.experiment.loss.weight(points.stop - points.start)
        return summed * weight * self.setting.descent.scale

    def output_gradient(
        self, outputs: Float[Tensor, "point out"]
    ) -> Float[Tensor, "train out"]:
        """Return ℓ′, the gradient of the loss of each training example at its outputs.
        It does not include the weight of the example in the mean."""
        points = slice(0, self.setting.points.train)
        return self.setting.experiment.loss.output_gradient(
            outputs[points], self.setting.problem.targets[points]
        )

    def row(self, step: Step, time: float) -> Row:
        """Return the metrics of the network before a step, with the step size and the
        clipping factor of this step."""
        clips = self.setting.experiment.optimizer.clip_norm is not None
        row = self.step(step.index, time, step.view.outputs, step.view.weights)
        return row | {
            "step_size": step.step_size,
            "clipping": step.clipping if clips else None,
        }

    def step(
        self,
        step: int,
        time: float,
        outputs: Float[Tensor, "point out"],
        weights: Weights,
    ) -> Row:
        """Return the metrics of the network after `step` steps.

        All numbers are copied from the device in one transfer.
        """
        problem = self.setting.problem
        splits = self.splits(step)
        numbers = {
            "loss" + name: self.summed_loss(outputs, points)
            for name, points in splits.items()
        }
        if problem.data.classes:
            for name, points in splits.items():
                hits = predicted_label(outputs[points]) == predicted_label(
                    problem.targets[points]
                )
                # the argmax of NaN would be the first class
                accuracy = hits.double().mean()
                is_finite = outputs[points].isfinite().all()
                numbers["accuracy" + name] = accuracy.where(is_finite, math.nan)
        start = problem.weights
        differences = squared_norms(
            {name: weights[name] - start[name] for name in start}
        )
        values = iter(scalars_to_cpu(*numbers.values(), *differences.values()))
        measured = {name: next(values) for name in numbers}
        for name, points in splits.items():
            measured["loss" + name] = self.objective(measured["loss" + name], points)

        row: Row = {"step": step, "time": time}
        row |= dict.fromkeys("accuracy" + name for name in splits)
        if problem.phases:
            row["phase"] = self.phase(step)
        row |= measured

        # ‖θ_s − θ_0‖/‖θ_0‖, in total and for each parameter
        squared_changes = dict(zip(differences, values, strict=True))
        row["weights_moved"] = root_ratio(
            sum(squared_changes.values()), sum(self.sizes.values())
        )
        for name, squared in squared_changes.items():
            row[f"weights_moved.{name}"] = root_ratio(squared, self.sizes[name])
        return row

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The squared norm of each parameter before training."""
        norms = squared_norms(self.setting.problem.weights)
        return dict(zip(norms, scalars_to_cpu(*norms.values()), strict=True))


def share_row(tallies: Mapping[str, Tally], closing: AbstractRule | None) -> Row:
    """Return the columns `SHARE_COLUMNS` of a step: the norms of its contributions and
    of its other terms.

    `tallies` holds these norms for each quadrature rule. If no norms were measured at
    this step, return an empty row. The column `closure` belongs to the rule `closing`,
    whose contributions add up to the change of the outputs. The other columns belong to
    the first rule in `tallies`."""
    if not tallies:
        return {}
    first = next(iter(tallies.values()))
    return {
        "closure": tallies[closing.option].closure if closing else None,
        "contribution_mass": first.contribution_mass,
        "contribution_sum": first.contribution_sum,
        "kernel_mass": first.kernel_mass,
    }


def squared_norms(weights: Weights) -> dict[str, Float[Tensor, ""]]:
    """Return the squared norm of each parameter.

    >>> import torch
    >>> squared_norms({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor(25.)}
    """
    return {name: part.square().sum() for name, part in weights.items()}


def root_ratio(above: float, below: float) -> float | None:
    return (above / below) ** 0.5 if below else None
