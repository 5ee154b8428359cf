"""When the kernel turns towards the targets: before the loss falls, from a small start; while it falls, from a large.

    turn      A_early − A_0,   A = yᵀKy/(‖K‖ ‖y‖²) among the training examples
    turned    the same as a share of A_T − A_0, which is next to nothing from a large start
    grown     (‖K_early‖ − ‖K_0‖)/(‖K_T‖ − ‖K_0‖)
    gap       ‖K_T(x, X) K_T(X, X)⁻¹ f_T(X) − f_T(x)‖/‖f_T(x)‖ at new points x: whether f_T is regression with K_T

Inputs are coordinates along the principal directions of the examples, `raw`, or `whitened`: each then as large as the
others. Targets are ±1 less their mean, of which standardised inputs know nothing. `early` is the first step before
which the loss has fallen by `fallen` of itself, T that before which `until` of it is left.

Rows are told apart by `network`, by `inputs`, and by `start`, the scale α of the outputs f = α (g(θ) − g(θ₀)): where g
is homogeneous of degree k in its weights, a small α is a start from weights that are α^{1/k} as large. Of one hidden
layer without activations `gap` says nothing: whatever is linear and right at the examples is right in their span.

A. Atanasov, B. Bordelon & C. Pehlevan, "Neural networks as kernel learners: the silent alignment effect" (2021),
arXiv:2111.00034.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.claim.named import refuse_unnamed
from ntkexp.claim.trial.after_kernel import regression
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.scaled_descent import LearningStep
from ntkexp.claim.trial.scaled_network import LearnedTask, ScaledNetwork, task_of
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.diagnostics.drift import alignment
from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.records.sweep import Level
from ntkexp.shapes import Weights
from ntkexp.stream import stream

RIDGE = 1e-12
"""What regression adds to the kernel, as a share of its mean diagonal: it keeps what is singular from being refused."""


class SilentAlignment(AbstractTrial):
    """The same network learns two classes from a small start and from a large one."""

    names: tuple[str, ...] = Field(min_length=1)
    models: tuple[AbstractArchitecture, ...]
    init: AbstractInit
    data: AbstractSource
    small: float = Field(0.001, gt=0)
    large: float = Field(1.0, gt=0)
    fallen: float = Field(0.1, gt=0, lt=1)
    until: float = Field(0.01, gt=0, description="as a share of the loss at the start")
    steps: Count = 4000
    fraction: float = Field(0.4, gt=0, lt=1)
    stride: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        """Every model has a name of its own."""
        refuse_unnamed("trial.names", self.names, "models", self.models)
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if len(data.classes) != 2 or not len(data.test.inputs):
            raise Mistake("trial.data: choose data of two classes, and leave some for the test, such as data=digits")
        task, new = task_of(data.train), task_of(data.test)
        pairs = zip(("raw", "whitened"), principal_maps(task.inputs.flatten(1)), strict=True)
        given = {inputs: (mapped(task, by), mapped(new, by)) for inputs, by in pairs}
        return [
            {"network": name, "inputs": inputs, "start": start, **self.row(model, alpha, *pair, seed)}
            for name, model in zip(self.names, self.models, strict=True)
            for inputs, pair in given.items()
            for start, alpha in (("small", self.small), ("large", self.large))
        ]

    def row(
        self, model: AbstractArchitecture, alpha: float, task: LearnedTask, new: LearnedTask, seed: int
    ) -> Mapping[str, float]:
        """Learn from one start."""
        module = model.module(self.init, tuple(task.inputs.shape[1:]), 1, stream("weights", seed)).eval()
        network = ScaledNetwork(module, alpha)
        first = float(task.targets.square().mean() / 2)
        path = network.learn(
            {name: weight.clone() for name, weight in network.start.items()},
            task,
            self.steps,
            self.fraction,
            self.until * first,
            self.stride,
        )
        early, last = stations(path, (1 - self.fallen) * first)
        missed = network.outputs(last, task.inputs) - task.targets
        if early is None or not float(missed.square().mean() / 2) <= self.until * first:
            return dict.fromkeys(("turn", "turned", "grown", "gap"), math.nan)
        kernels = [network.kernel(weights, task.inputs, task.inputs) for weights in (network.start, early, last)]
        wanted = torch.outer(task.targets, task.targets)
        turns, sizes = [alignment(kernel, wanted) for kernel in kernels], [float(kernel.norm()) for kernel in kernels]
        outputs = network.outputs(last, new.inputs)
        across = network.kernel(last, new.inputs, task.inputs)
        said = regression(kernels[2], across, network.outputs(last, task.inputs), RIDGE)
        return {
            "turn": turns[1] - turns[0],
            "turned": share(turns),
            "grown": share(sizes),
            "gap": float((said - outputs).norm() / outputs.norm()),
            "alignment_start": turns[0],
            "alignment_early": turns[1],
            "alignment_end": turns[2],
        }


def stations(path: Iterable[LearningStep], below: float) -> tuple[Weights | None, Weights]:
    """Find the weights at the first step with so small a loss, if there is one, and those at the end."""
    early, last = None, None
    for step in path:
        if early is None and step.loss <= below:
            early = step.before
        last = step.after
    if last is None:
        raise Mistake("trial.until is above the loss at the start, so nothing is learned; give a number below 1")
    return early, last


def principal_maps(
    inputs: Float[Tensor, "example feature"],
) -> tuple[Float[Tensor, "feature direction"], Float[Tensor, "feature direction"]]:
    """Map to coordinates along principal directions, and to whitened ones; both have a mean square of one.

    >>> raw, whitened = principal_maps(torch.tensor([[1.0, 0.0, 0.0], [0.0, 7.0, 0.0]], dtype=torch.float64))
    >>> [each.norm(dim=0).round(decimals=4).tolist() for each in (raw, whitened)]
    [[0.2828, 0.2828], [0.202, 1.4142]]
    """
    _, sizes, directions = torch.linalg.svd(inputs, full_matrices=False)
    known = sizes > sizes[0] * len(inputs) * torch.finfo(inputs.dtype).eps
    sizes, directions = sizes[known] / len(inputs) ** 0.5, directions[known].t()
    return directions / sizes.square().mean().sqrt(), directions / sizes


def mapped(task: LearnedTask, by: Float[Tensor, "feature direction"]) -> LearnedTask:
    """See a task in other coordinates, and its targets without their mean."""
    return LearnedTask(task.inputs.flatten(1) @ by, task.targets - task.targets.mean())


def share(values: Sequence[float]) -> float:
    """Which share of the way from the first to the last was gone at the middle one.

    >>> share([1.0, 2.0, 5.0])
    0.25
    """
    first, middle, last = values
    return (middle - first) / (last - first)
