"""An experiment: the settings of its data, model, training and measurements.

>>> memory_limit("cpu")  # GB that a run may use by default
4.0
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from itertools import accumulate
from typing import Literal, Self

import torch
from pydantic import Field, PositiveFloat, field_validator, model_validator

from ntkexp.capacity import DEFAULT_MEMORY_GB, MemoryBudget
from ntkexp.component import Component, Steps
from ntkexp.data.base import AbstractSource, Data
from ntkexp.diagnostics.base import AbstractDiagnostic
from ntkexp.init import AbstractInit
from ntkexp.kernel.record.taping import MemoryLimit
from ntkexp.loss import AbstractLoss
from ntkexp.machine.ladder import Ladder
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.naming import is_in_this_package
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.integration import AbstractIntegration, choose_integration
from ntkexp.path.settings import AbstractTimetable, Kernel, Path
from ntkexp.schedule import AbstractSchedule


class Experiment(Component):
    """All settings of a run.

    Settings that do not affect the results, such as `threads`, are *circumstances*.
    `records.folder` lists the circumstances. They are not part of the experiment's
    identity."""

    data: AbstractSource
    model: AbstractArchitecture
    init: AbstractInit
    loss: AbstractLoss
    optimizer: AbstractOptimizer
    schedule: AbstractSchedule
    path: Path
    kernel: Kernel = Kernel()
    ladder: Ladder
    diagnostics: tuple[AbstractDiagnostic, ...] = ()
    steps: Steps = 300
    stop_at_loss: PositiveFloat | None = None
    seed: int = Field(0, ge=0, lt=2**40)
    dtype: Literal["float64", "float32"] = "float64"
    device: str = "cpu"
    threads: int | None = Field(None, ge=1, le=1024)
    memory_gb: float | None = Field(None, gt=0, le=1e6)
    checkpoint_seconds: float = Field(30.0, ge=0)

    def draw(self) -> Data:
        """Draw the data from the seed. Raise if the data exceed the memory limit
        of the host."""
        # the limit of the host's memory, not of the device's memory
        host = MemoryBudget.of_gb(self.memory_gb or DEFAULT_MEMORY_GB)
        remedy = "data.train, data.query, data.test or the size of an example"
        with MemoryLimit(host, "the data", remedy):
            return self.data.split(self.seed)

    @field_validator("device")
    @classmethod
    def refuse_other_device(cls, name: str) -> str:
        """Raise for device names that torch does not know.

        A run checks at its beginning if the device is present.
        """
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about deprecated device names
            device = torch.device(name)
            if str(device) == name and (device.type != "cpu" or device.index is None):
                return name
        raise Mistake(
            "it takes cpu, cuda, cuda:1, mps, xpu or another device that torch knows"
        )

    @property
    def budget(self) -> MemoryBudget:
        """The memory limit of a run: `memory_gb`, or the default of the device."""
        return MemoryBudget.of_gb(self.memory_gb or memory_limit(self.device))

    @property
    def switches(self) -> tuple[int, ...]:
        """The first step of every phase of the data except the first phase."""
        return tuple(accumulate(self.data.phase_steps(self.steps)))[:-1]

    @property
    def loss_scale(self) -> float:
        """The factor of the loss: 1/α² if the network is centred
        (its outputs at initialization are subtracted), else 1."""
        return self.init.alpha**-2 if self.init.centred else 1.0

    def timetable(self) -> AbstractTimetable:
        """Return the steps of snapshots, which measure kernels, recorded arrays and
        diagnostics."""
        return self.path.timetable(
            self.steps, self.switches, measures=bool(self.diagnostics)
        )

    @model_validator(mode="after")
    def refuse_absent_precision(self) -> Self:
        """Raise if the device does not support the dtype."""
        if self.device.partition(":")[0] == "mps" and self.dtype == "float64":
            raise Mistake(
                f"device={self.device}: it has no float64 numbers; add dtype=float32, or use device=cpu"
            )
        return self

    @model_validator(mode="after")
    def refuse_phases(self) -> Self:
        """Raise if the data have several phases
        and a setting supports only one phase."""
        self.timetable()
        if not self.switches:
            return self
        if self.stop_at_loss is not None:
            raise Mistake(
                f"stop_at_loss={self.stop_at_loss:g}: data={self.data.option} trains in phases, "
                "and the loss of one phase would end all phases; leave it out, and give "
                "data.steps"
            )
        if not self.path.explains_outputs:
            raise Mistake(
                f"path.measure={self.path.measure.option}: the effects of the tasks of "
                f"data={self.data.option} on one another are computed for outputs only; use "
                "path.measure=output"
            )
        if self.path.effects:
            raise Mistake(
                f"path.effects={str(self.path.effects).lower()}: effects are not known for data={self.data.option}, "
                "which is learned in phases; leave it out: contributions are known by phase"
            )
        if self.path.every == "snapshots":
            raise Mistake(
                f"path.every=snapshots: snapshots do not support data={self.data.option}, which "
                "switches tasks during training; use path.every=1"
            )
        return self

    @model_validator(mode="after")
    def refuse_unusable_diagnostics(self) -> Self:
        """Raise if two diagnostics have the same name, or if a diagnostic needs kernels
        or steps that the run does not have."""
        names = [diagnostic.option for diagnostic in self.diagnostics]
        for diagnostic in self.diagnostics:
            name = diagnostic.option
            if names.count(name) > 1:
                raise Mistake(f"diagnostics: {name} is given twice; leave one out")
            if diagnostic.needs_kernel and not self.path.keeps_kernels:
                raise Mistake(
                    f"diagnostics: {name} reads tangent kernels, and there are none with "
                    f"path.kernels={self.path.kernels}; use path.kernels=all"
                )
            if diagnostic.needs_steps and self.optimizer.flows:
                raise Mistake(
                    f"diagnostics: {name} reads training steps, and optimizer="
                    f"{self.optimizer.option} has none; use another optimizer"
                )
        return self

    @property
    def integration(self) -> AbstractIntegration:
        """The method that integrates over the training path, for this optimizer."""
        return choose_integration(self.optimizer, self.path)

    @property
    def knows_derivative(self) -> bool:
        """True if the derivative of the optimizer's update is implemented."""
        return is_in_this_package(type(self.optimizer).update.__module__)

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        """Raise if the settings of the path contradict each other or the optimizer, for
        example if leave-out effects are requested but cannot be computed."""
        _ = self.integration  # raises if the settings of the path contradict each other

        # effects are derivatives of the optimizer's steps; if there are few examples,
        # retraining without each example replaces the derivatives
        given = f"path.effects={str(self.path.effects).lower()}"
        if self.path.effects and self.optimizer.flows:
            raise Mistake(
                f"{given}: optimizer={self.optimizer.option} is a flow, which has no steps to "
                "differentiate; use optimizer=gd with a small optimizer.step_size"
            )
        if (
            self.path.effects
            and not self.knows_derivative
            and not self.path.may_retrain
        ):
            raise Mistake(
                f"{given}: the derivative of the steps of optimizer={self.optimizer.option} is "
                "not known; use path.effects=true with path.mean=renormalised, which trains "
                "without each example if this takes few trainings, or use one of ntkexp's "
                "optimizers"
            )
        return self


# the rest of a GPU's memory is for torch itself and for fragmentation
GPU_MEMORY_SHARE = 0.8


def memory_limit(device: str) -> float:
    """Return the default memory limit of a device in GB.

    For a GPU, the limit is a fixed share of its total memory. The free memory would
    differ from run to run. A different limit changes the sizes of blocks, and thus
    rounding errors. For an absent or unknown device, return the limit of the CPU."""
    kind = torch.device(device)
    if (
        kind.type == "cpu"
        or not (module := torch.get_device_module(kind)).is_available()
    ):
        return DEFAULT_MEMORY_GB
    if kind.type == "mps":
        return GPU_MEMORY_SHARE * torch.mps.recommended_max_memory() / 1e9
    if not hasattr(module, "mem_get_info"):
        return DEFAULT_MEMORY_GB
    # an index of None means the current device
    _, total = module.mem_get_info(kind.index)
    return GPU_MEMORY_SHARE * float(total) / 1e9
