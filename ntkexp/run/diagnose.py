"""The diagnostics of a run, which are measured at each step with a snapshot."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.capacity import split_range
from ntkexp.diagnostics.base import (
    AbstractDiagnostic,
    EarlierKernel,
    StepParts,
    TrainingState,
)
from ntkexp.kernel import gram
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.components import components_of
from ntkexp.path.points import NetworkView, total_gradient
from ntkexp.path.step import Step
from ntkexp.records.diagnostics import COLUMN, STEP
from ntkexp.run.metrics import Observer, Row
from ntkexp.run.setting import Setting
from ntkexp.stream import global_seed, stream

NAME = re.compile(r"[A-Za-z_][\w.()-]{0,150}")
"""A pattern for the names of values. Each value becomes a column of metrics.csv,
or a folder in diagnostics.zarr."""


@dataclass(frozen=True)
class Measurements:
    """The values of all diagnostics at one step."""

    numbers: Row  # numbers by column of metrics.csv
    arrays: Mapping[str, Tensor]  # arrays by name in diagnostics.zarr

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self.arrays.items()}


@dataclass
class RunDiagnostics:
    """The diagnostics of a run, with the kernels that later measurements need."""

    setting: Setting
    # the kernel of the previous measurement, for comparison with the present kernel
    earlier: EarlierKernel | None = None
    # the parts of the initial kernel that were computed so far. Each key is the set of
    # parameters that contribute to the part
    start_kernels: dict[frozenset[str], Tensor] = field(
        default_factory=dict, repr=False
    )

    def measure(
        self,
        kernel: Float[Tensor, "point kept train kept_"],
        view: NetworkView,
        step: int,
        time: float,
        next_step: Callable[[], Step] | None,
    ) -> Measurements:
        experiment = self.setting.experiment
        diagnostics = experiment.diagnostics
        numbers: Row = {}
        arrays: dict[str, Tensor] = {}
        if not diagnostics:
            return Measurements(numbers, arrays)
        state = self.training_state(kernel, view, step, time, next_step)
        # the same random numbers in each repetition of the run, and after a resumption
        seed = stream("diagnostics", experiment.seed, step).initial_seed()
        for diagnostic in diagnostics:
            with global_seed(seed):
                measured = named_values(diagnostic, state)
            for name, value in measured.items():
                if isinstance(value, Tensor):
                    arrays[name] = value
                else:
                    numbers[f"{COLUMN}{name}"] = value
        if state.kernel is not None:
            self.earlier = EarlierKernel(step=step, kernel=state.kernel)
        return Measurements(numbers, arrays)

    def training_state(
        self,
        kernel: Float[Tensor, "point kept train kept_"],
        view: NetworkView,
        step: int,
        time: float,
        next_step: Callable[[], Step] | None,
    ) -> TrainingState:
        setting = self.setting
        points = setting.points
        problem = setting.problem
        train = points.train
        has_kernel = setting.experiment.path.keeps_kernels
        # the training examples of the present phase, or all if there are no phases
        current = Observer(setting).splits(step)[""]
        examples = range(train)[current]
        weight = setting.descent.weight(len(examples))
        loss = setting.experiment.loss

        def weighted_loss(outputs: Tensor, targets: Tensor) -> Float[Tensor, ""]:
            return loss.value(outputs, targets).sum() * weight

        step_size = None
        step_parts = None
        if next_step is not None:
            step_size = setting.descent.step_size_at(step)
            step_parts = partial(parts_of_step, next_step, setting.descent.optimizer)
        return TrainingState(
            step=step,
            time=time,
            step_size=step_size,
            weights=view.weights,
            start_weights=problem.weights,
            network=points.reader.function,
            loss=weighted_loss,
            blocks=[
                (points.inputs[block], problem.targets[block])
                for block in split_range(examples.start, examples.stop, points.block)
            ],
            input_blocks=[
                points.inputs[block]
                for block in (*points.train_blocks, *points.other_blocks)
            ],
            outputs=view.train_outputs,
            query_outputs=view.outputs[train:],
            targets=problem.targets[:train],
            kernel=kernel[:train] if has_kernel else None,
            start_kernel=setting.start.kernel[:train] if has_kernel else None,
            query_kernel=kernel[train:] if has_kernel else None,
            earlier=self.earlier,
            layers=components_of("module", problem.weights),
            kernel_of=partial(kernel_of_parameters, view),
            start_kernel_of=self.start_kernel_of,
            step_parts=step_parts,
        )

    def start_kernel_of(
        self, parameters: Collection[str]
    ) -> Float[Tensor, "train out train out_"]:
        """Return the part of the initial kernel that comes from these parameters."""
        names = frozenset(parameters)
        if names not in self.start_kernels:
            view = NetworkView(self.setting.points, self.setting.problem.weights)
            self.start_kernels[names] = kernel_of_parameters(view, names)
        return self.start_kernels[names]

    @property
    def state(self) -> dict[str, Any] | None:
        earlier = self.earlier
        return (
            None
            if earlier is None
            else {"step": earlier.step, "kernel": earlier.kernel}
        )

    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            kernel = state["kernel"].to(self.setting.start.kernel.device)
            self.earlier = EarlierKernel(step=state["step"], kernel=kernel)


def measure_at_start(setting: Setting) -> Measurements:
    """Measure the diagnostics before training. The values define the columns and the
    arrays of the run."""
    if not setting.experiment.diagnostics:
        return Measurements({}, {})
    weights = setting.problem.weights
    view = NetworkView(setting.points, weights)
    first_step = partial(setting.descent.step, 0, weights, {})
    return RunDiagnostics(setting).measure(
        setting.start.kernel, view, 0, 0.0, first_step
    )


def kernel_of_parameters(
    view: NetworkView, parameters: Collection[str]
) -> Float[Tensor, "train out train out_"]:
    """Return Σ_w ∂f(x)/∂w ∂f(x′)/∂w over some of the weights w,
    between training examples."""
    parts = [jacobian.of(parameters) for jacobian in view.train_jacobians]
    return torch.cat(
        [torch.cat([gram(left, right) for right in parts], dim=2) for left in parts]
    )


def parts_of_step(
    next_step: Callable[[], Step], optimizer: AbstractOptimizer
) -> StepParts:
    """Divide the change of the weights in a step into the part of earlier gradients and
    the part of the present gradient."""
    step = next_step()
    view = step.view
    gradient = total_gradient(view.loss_gradients(step.output_gradient), view.weights)
    linear_steps = optimizer.linear_steps(step.index, step.sizes, step.memory)
    by_momentum = {}
    by_gradient = {}
    for name, weight in view.weights.items():
        linear = linear_steps[name].divided()

        # p = g + λθ    Δ_g = −(S ⊙ α + N) ⊙ p
        decayed = gradient[name] + linear.l2 * weight
        scale = linear.momentum_scale * linear.momentum_gain + linear.gradient_scale
        by_gradient[name] = -scale * decayed

        # Δ_m = θ′ − (1 − d)θ − Δ_g, which is zero without earlier gradients
        by_momentum[name] = torch.zeros_like(weight)
        if step.index > 0 and linear.momentum_decay > 0:
            change = step.end[name] - weight + linear.decoupled_decay * weight
            by_momentum[name] = change - by_gradient[name]
    return StepParts(momentum=by_momentum, gradient=by_gradient)


def named_values(
    diagnostic: AbstractDiagnostic, state: TrainingState
) -> dict[str, float | Tensor | None]:
    """Measure a diagnostic. Return its numbers and arrays by name.
    Raise for any other kind of value."""
    name = diagnostic.option
    with tensors_unchanged(name, state):
        measured = diagnostic.measure(state)
    if not isinstance(measured, Mapping):
        measured = {"": measured}
    values: dict[str, float | Tensor | None] = {}
    for key, value in measured.items():
        full_name = f"{name}.{key}" if key else name
        if not NAME.fullmatch(full_name) or full_name == STEP:
            raise Mistake(
                f"diagnostics: {full_name!r} cannot be the name of a column; use letters, digits, "
                f"_ and dots, and another name than {STEP}"
            )
        values[full_name] = checked_value(full_name, value)
    return values


def checked_value(name: str, value: object) -> float | Tensor | None:
    """Return a number, None, or a copy of an array. Raise for any other value."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return float(value)
    if isinstance(value, float | int):
        return float(value)
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise Mistake(
            f"diagnostics: {name} is a {type(value).__name__}; return a number, a tensor, None, or "
            "a dict of them"
        )
    if not (value.is_floating_point() and value.numel()):
        raise Mistake(
            f"diagnostics: {name} is a tensor of {value.dtype} with shape {list(value.shape)}; "
            "return floating point numbers, at least one"
        )
    return value.detach().clone()


@contextmanager
def tensors_unchanged(name: str, state: TrainingState) -> Iterator[None]:
    """Raise if the `with` block changes a tensor of the state in place. Training
    continues with these tensors, so diagnostics must not change them."""
    tensors = {f"weights['{key}']": weight for key, weight in state.weights.items()}
    tensors |= {
        f"start_weights['{key}']": weight for key, weight in state.start_weights.items()
    }
    tensors |= {f"blocks[{k}][0]": inputs for k, (inputs, _) in enumerate(state.blocks)}
    tensors |= {f"input_blocks[{k}]": part for k, part in enumerate(state.input_blocks)}
    tensors |= {
        field_name: value
        for field_name, value in vars(state).items()
        if isinstance(value, Tensor)
    }
    versions = {key: tensor._version for key, tensor in tensors.items()}
    yield
    changed = [
        key for key, tensor in tensors.items() if tensor._version != versions[key]
    ]
    if changed:
        raise Mistake(
            f"diagnostics: {name} changes state.{changed[0]} in place, with which training would "
            "go on; change a copy, such as tensor.clone()"
        )
