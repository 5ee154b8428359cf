"""What is logged along the way: a row of numbers for every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.ladder import label
from ntkexp.path.accumulate.tally import Tally, fetched
from ntkexp.path.rule.base import AbstractRule
from ntkexp.path.step import Step
from ntkexp.run.kernel_metrics import KernelObserver
from ntkexp.run.row import Row
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights

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
            own = {name: place for name, place in self.tasks.items() if name.endswith(here)}
            return {name.removesuffix(here): place for name, place in own.items()} | self.tasks
        found = {"": slice(0, self.setting.points.train)}
        if probe := self.setting.problem.places.get("probe"):
            found["_probe"] = probe
        return found

    @cached_property
    def tasks(self) -> dict[str, slice]:
        """Where training and probe examples of every phase are, counted from 1, if there are phases."""
        phases = self.setting.problem.phases
        read = {"": phases.get("train", ()), "_probe": phases.get("probe", ())}
        return {
            f"{name}_{number}": place
            for name, places in read.items()
            for number, place in enumerate(places, start=1)
            if place.stop > place.start
        }

    def phase(self, step: int) -> int:
        """The number of the phase that a step is of, counted from 1."""
        return self.setting.descent.phases.index(self.setting.descent.phase(step)) + 1

    def loss(self, outputs: Float[Tensor, "point out"], step: int) -> float:
        """The training objective of a step."""
        place = self.splits(step)[""]
        return self.objective(float(self.summed_loss(outputs, place)), place)

    def summed_loss(self, outputs: Float[Tensor, "point out"], place: slice) -> Float[Tensor, ""]:
        """The losses of a split's examples, added up."""
        return self.setting.experiment.loss.value(outputs[place], self.setting.problem.targets[place]).sum()

    def objective(self, summed: float, place: slice) -> float:
        """The objective that this makes, with the split's own weights."""
        return summed * self.setting.experiment.loss.weight(place.stop - place.start) * self.setting.descent.scale

    def output_gradient(self, outputs: Float[Tensor, "point out"]) -> Float[Tensor, "train out"]:
        """ℓ′ of every training example."""
        place = slice(0, self.setting.points.train)
        return self.setting.experiment.loss.output_gradient(outputs[place], self.setting.problem.targets[place])

    def accuracy(self, outputs: Float[Tensor, "point out"], place: slice) -> Float[Tensor, ""]:
        """The share of points whose label is right."""
        right = label(outputs[place]) == label(self.setting.problem.targets[place])
        return right.double().mean()

    def row(self, step: Step, time: float) -> Row:
        """The numbers of a step before it is taken: how long it is as well, and by how much its gradient was shortened,
        where it might have been.
        """
        clips = self.setting.experiment.optimizer.clip_norm is not None
        row = self.step(step.index, time, step.outputs, step.view.weights)
        return row | {"step_size": step.step_size, "clipping": step.clipping if clips else None}

    def step(self, step: int, time: float, outputs: Float[Tensor, "point out"], weights: Weights) -> Row:
        """The numbers of every step, for which a device is waited for once."""
        start, splits = self.setting.problem.weights, self.splits(step)
        numbers = {"loss" + name: self.summed_loss(outputs, place) for name, place in splits.items()}
        if self.setting.problem.data.classes:
            numbers |= {"accuracy" + name: self.accuracy(outputs, place) for name, place in splits.items()}
        moved = squares({name: weights[name] - start[name] for name in start})
        found = iter(fetched(*numbers.values(), *moved.values()))
        seen = {name: next(found) for name in numbers}
        seen |= {"loss" + name: self.objective(seen["loss" + name], place) for name, place in splits.items()}
        row: Row = {"step": step, "time": time} | dict.fromkeys("accuracy" + name for name in splits)
        if self.setting.problem.phases:
            row["phase"] = self.phase(step)
        return row | seen | self.movement(dict(zip(moved, found, strict=True)))

    def movement(self, moved: dict[str, float]) -> Row:
        """‖θ_s − θ_0‖/‖θ_0‖, in total and for each parameter."""
        row: Row = {"weights_moved": ratio(sum(moved.values()), sum(self.sizes.values()))}
        return row | {f"weights_moved.{name}": ratio(moved[name], self.sizes[name]) for name in moved}

    @cached_property
    def sizes(self) -> dict[str, float]:
        """‖θ_0‖², parameter by parameter."""
        found = squares(self.setting.problem.weights)
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


def squares(weights: Weights) -> dict[str, Float[Tensor, ""]]:
    """‖·‖² of every parameter.

    >>> import torch
    >>> squares({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor(25.)}
    """
    return {name: part.square().sum() for name, part in weights.items()}


def ratio(above: float, below: float) -> float | None:
    """√(above/below)."""
    return (above / below) ** 0.5 if below else None
