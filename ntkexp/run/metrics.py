"""What is logged along the way: a row of numbers for every step, more where a tangent kernel is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.diagnostics import (
    DENSE,
    TOP,
    activity,
    alignment,
    drift,
    label_alignment,
    largest_kernel_eigenvalue,
    pattern,
    selectivity,
    spectrum,
)
from ntkexp.machine.base import DoesNotApply
from ntkexp.machine.ladder import predicted_label
from ntkexp.model.functional import called
from ntkexp.path.integrals import Tally, fetched
from ntkexp.path.points import NetworkView, Points
from ntkexp.path.rule.base import AbstractRule
from ntkexp.path.step import Step
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights

Row: TypeAlias = dict[str, float | int | None]
"""Numbers of the log by the names of their columns."""


# --- What is logged of a tangent kernel that is kept: how far it has moved, its eigenvalues, and what steps make of
# it.


RESIDUAL_TOPS = (1, 5, 10)
KERNEL_COLUMNS = (
    *("drift", "alignment", "limit_distance", "limit_alignment", "label_alignment"),
    *("trace", "lambda_max", "condition", "effective_rank"),
    *(f"eigenvalue_{k + 1}" for k in range(TOP)),
    *(f"residual_top_{k}" for k in RESIDUAL_TOPS),
    *("stability", "pattern_change"),
)
SELECTIVITY = "selectivity"


@dataclass(frozen=True)
class KernelObserver:
    """Compares the kernels that it sees with the first."""

    setting: Setting

    @property
    def columns(self) -> tuple[str, ...]:
        """The part of the header that is of kernels."""
        return (*KERNEL_COLUMNS, *((SELECTIVITY,) if self.setting.problem.phases else ()))

    @cached_property
    def train_limit(self) -> Float[Tensor, "train kept train kept_"] | None:
        """K_∞ among the training examples, where it is known."""
        if isinstance(self.setting.start.limit, DoesNotApply):
            return None
        limit, outputs = self.setting.start.limit, self.setting.problem.outputs
        whole = (
            limit.of_all(outputs) if self.setting.points.makes_kernels else limit.traced(outputs)
        )
        return whole[: self.setting.points.train]

    @cached_property
    def pattern(self) -> Bool[Tensor, " unit"]:
        """The activation pattern on the training examples at the start."""
        return activation_pattern(self.setting.points, self.setting.problem.weights)

    def row(
        self,
        kernel: Float[Tensor, "point kept train kept_"],
        view: NetworkView,
        step: int,
        step_size: float | None,
    ) -> Row:
        """The numbers of a tangent kernel, or of its trace over outputs; λ_max is always that of the kernel.

        How stable a step is depends on the examples that it is on.
        """
        setting, points, descent = self.setting, self.setting.points, self.setting.descent
        train = points.train
        here, start, targets = (
            kernel[:train],
            setting.start.kernel[:train],
            setting.problem.targets[:train],
        )
        # how far K_s has moved from K_0, and from the kernel of infinite width
        changed = activation_pattern(points, view.weights) != self.pattern
        row: Row = {
            "drift": drift(here, start),
            "alignment": alignment(here, start),
            "label_alignment": label_alignment(here, targets),
            "trace": float(here.flatten(2).flatten(0, 1).trace()),
            "pattern_change": float(changed.double().mean()) if len(changed) else None,
        }
        if (limit := self.train_limit) is not None:
            row["limit_distance"] = drift(here, limit)
            row["limit_alignment"] = alignment(here, limit)
        # its eigenvalues, and the share of the residual in the first of them
        row |= self.modes(here, view.train_outputs - targets)
        if not points.makes_kernels:
            row["lambda_max"] = view.largest_eigenvalue(slice(None))
        # η w λ_max ℓ″/2 of the examples that the step is on: below 1 it is stable
        if step_size is not None and (top := row["lambda_max"]) is not None:
            weight = descent.weight(train)
            if setting.domain.switches:
                phase = descent.phase(step)
                weight, own = descent.weight(phase.count), here[phase.examples, :, phase.examples]
                top = (
                    largest_kernel_eigenvalue(own)
                    if points.makes_kernels
                    else view.largest_eigenvalue(phase.examples)
                )
            row["stability"] = step_size * weight * top * setting.experiment.loss.curvature / 2
        if setting.problem.phases:
            row[SELECTIVITY] = unit_selectivity(setting, view.weights)
        return row

    def modes(
        self, kernel: Float[Tensor, "train kept train kept_"], residual: Float[Tensor, "train out"]
    ) -> Row:
        """The numbers of the eigenvalues, of a kernel that is finite and small enough; of a larger one, the first."""
        if not kernel.isfinite().all():
            return {"lambda_max": None}
        entries = kernel.shape[0] * kernel.shape[1]
        if entries > DENSE:
            return {"lambda_max": largest_kernel_eigenvalue(kernel)}
        modes = spectrum(kernel)
        row: Row = {
            "lambda_max": float(modes.values[0]),
            "condition": modes.condition,
            "effective_rank": modes.effective_rank,
        }
        row |= {f"eigenvalue_{k + 1}": float(value) for k, value in enumerate(modes.values[:TOP])}
        return row | {
            f"residual_top_{k}": modes.share(residual.reshape(entries, -1), k)
            for k in RESIDUAL_TOPS
        }


def activation_pattern(points: Points, weights: Weights) -> Bool[Tensor, " unit"]:
    return torch.cat([pattern(points.tape(weights, block)) for block in points.train_blocks])


def unit_selectivity(setting: Setting, weights: Weights) -> float | None:
    """Whether units became tuned to one of the tasks that are learned in turn: their selectivity at the probe points of
    each, or where there are none, at training examples; nothing of a single task.
    """
    module, points, phases = setting.problem.module, setting.points, setting.problem.phases
    answers = []
    for phase in phases.get("probe") or phases.get("train", ()):
        parts = torch.split(points.inputs[phase], points.block)
        activities = [
            activity(module.network, partial(called, module, weights, (part,))) for part in parts
        ]
        units = [part for part in activities if part is not None]
        # the deviation of each unit's activity over the points of a task takes two of them
        if not units or phase.stop - phase.start < 2:
            return None
        answers.append(torch.cat(units).std(0))
    return selectivity(answers)


# --- What is logged along the way: a row of numbers for every step.


STEP_COLUMNS = (
    "step",
    "time",
    "step_size",
    "clipping",
    "loss",
    "accuracy",
    "loss_probe",
    "accuracy_probe",
    "weights_moved",
)
SHARE_COLUMNS = ("closure", "contribution_mass", "contribution_sum", "kernel_mass")


@dataclass(frozen=True)
class Observer:
    """Compares what it sees with the start of training."""

    setting: Setting

    @property
    def columns(self) -> tuple[str, ...]:
        """The header of the log."""
        layers = (f"weights_moved.{name}" for name in self.setting.problem.weights)
        tasks = (f"{column}{name}" for column in ("loss", "accuracy") for name in self.tasks)
        phases = ("phase", *tasks) if self.setting.problem.phases else ()
        return (*STEP_COLUMNS, *phases, *layers, *SHARE_COLUMNS, *self.kernels.columns)

    @cached_property
    def kernels(self) -> KernelObserver:
        """Where a kernel is kept, it is asked as well."""
        return KernelObserver(self.setting)

    def splits(self, step: int) -> dict[str, slice]:
        """Where training and probe examples are, by what is added to the names of their columns.

        Where there are phases, these are the examples of the step's own, and those of every phase follow.
        """
        if self.setting.problem.phases:
            here = f"_{self.phase(step)}"
            own = {name: points for name, points in self.tasks.items() if name.endswith(here)}
            return {name.removesuffix(here): points for name, points in own.items()} | self.tasks
        slices = {"": slice(0, self.setting.points.train)}
        if probe := self.setting.problem.places.get("probe"):
            slices["_probe"] = probe
        return slices

    @cached_property
    def tasks(self) -> dict[str, slice]:
        """Where training and probe examples of every phase are, counted from 1, if there are phases."""
        phases = self.setting.problem.phases
        read = {"": phases.get("train", ()), "_probe": phases.get("probe", ())}
        return {
            f"{name}_{number}": points
            for name, slices in read.items()
            for number, points in enumerate(slices, start=1)
            if points.stop > points.start
        }

    def phase(self, step: int) -> int:
        return self.setting.descent.phases.index(self.setting.descent.phase(step)) + 1

    def loss(self, outputs: Float[Tensor, "point out"], step: int) -> float:
        points = self.splits(step)[""]
        return self.objective(float(self.summed_loss(outputs, points)), points)

    def summed_loss(self, outputs: Float[Tensor, "point out"], points: slice) -> Float[Tensor, ""]:
        """The losses of a split's examples, added up."""
        return self.setting.experiment.loss.value(
            outputs[points], self.setting.problem.targets[points]
        ).sum()

    def objective(self, summed: float, points: slice) -> float:
        """The objective that this makes, with the split's own weights."""
        return (
            summed
            * self.setting.experiment.loss.weight(points.stop - points.start)
            * self.setting.descent.scale
        )

    def output_gradient(self, outputs: Float[Tensor, "point out"]) -> Float[Tensor, "train out"]:
        """ℓ′ of every training example."""
        points = slice(0, self.setting.points.train)
        return self.setting.experiment.loss.output_gradient(
            outputs[points], self.setting.problem.targets[points]
        )

    def row(self, step: Step, time: float) -> Row:
        """The numbers of a step before it is taken: how long it is as well, and by how much its gradient was shortened,
        where it might have been.
        """
        clips = self.setting.experiment.optimizer.clip_norm is not None
        row = self.step(step.index, time, step.view.outputs, step.view.weights)
        return row | {"step_size": step.step_size, "clipping": step.clipping if clips else None}

    def step(
        self, step: int, time: float, outputs: Float[Tensor, "point out"], weights: Weights
    ) -> Row:
        """The numbers of every step, for which a device is waited for once."""
        start, targets, splits = (
            self.setting.problem.weights,
            self.setting.problem.targets,
            self.splits(step),
        )
        numbers = {
            "loss" + name: self.summed_loss(outputs, points) for name, points in splits.items()
        }
        for name, points in splits.items() if self.setting.problem.data.classes else ():
            numbers["accuracy" + name] = (
                (predicted_label(outputs[points]) == predicted_label(targets[points]))
                .double()
                .mean()
            )
        differences = squared_norms({name: weights[name] - start[name] for name in start})
        values = iter(fetched(*numbers.values(), *differences.values()))
        seen = {name: next(values) for name in numbers}
        seen |= {
            "loss" + name: self.objective(seen["loss" + name], points)
            for name, points in splits.items()
        }
        row: Row = {"step": step, "time": time} | dict.fromkeys(
            "accuracy" + name for name in splits
        )
        if self.setting.problem.phases:
            row["phase"] = self.phase(step)
        # ‖θ_s − θ_0‖/‖θ_0‖, in total and for each parameter
        moved = dict(zip(differences, values, strict=True))
        row |= seen | {"weights_moved": root_ratio(sum(moved.values()), sum(self.sizes.values()))}
        return row | {
            f"weights_moved.{name}": root_ratio(moved[name], self.sizes[name]) for name in moved
        }

    @cached_property
    def sizes(self) -> dict[str, float]:
        """‖θ_0‖², parameter by parameter."""
        found = squared_norms(self.setting.problem.weights)
        return dict(zip(found, fetched(*found.values()), strict=True))


def share_row(tallies: Mapping[str, Tally], closing: AbstractRule | None) -> Row:
    """What the first rule said of a step, and how far one is from it that closes; nothing before it is integrated."""
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
    """‖·‖² of every parameter.

    >>> import torch
    >>> squared_norms({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor(25.)}
    """
    return {name: part.square().sum() for name, part in weights.items()}


def root_ratio(above: float, below: float) -> float | None:
    return (above / below) ** 0.5 if below else None
