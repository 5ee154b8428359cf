"""When in training something happens: when the kernel turns to the targets, and when a classifier generalises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor
from torch.func import jvp, vjp

from ntkexp.claim.trial.base import AbstractTrial, refuse_unnamed
from ntkexp.claim.trial.kernels import centred
from ntkexp.claim.trial.scaled import (
    LearnedTask,
    LearningStep,
    ScaledDescent,
    ScaledFunction,
    ScaledNetwork,
    regression,
    task_of,
)
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data
from ntkexp.diagnostics.spectrum import alignment, drift
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.init.base import AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.functional import function_of, weights_of
from ntkexp.records.sweep import Level
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

RIDGE = 1e-12
"""What regression adds to the kernel, as a share of its mean diagonal: it keeps what is singular from being refused."""


class SilentAlignment(AbstractTrial):
    """When the kernel turns towards the targets: before the loss falls, from a small start; while it falls, from a
    large.

    The same network learns two classes from a small start and from a large one.

        turn      A_early − A_0,   A = yᵀKy/(‖K‖ ‖y‖²) among the training examples
        turned    the same as a share of A_T − A_0, which is next to nothing from a large start
        grown     (‖K_early‖ − ‖K_0‖)/(‖K_T‖ − ‖K_0‖)
        gap       ‖K_T(x, X) K_T(X, X)⁻¹ f_T(X) − f_T(x)‖/‖f_T(x)‖ at new points x: whether f_T is regression with
                  K_T

    Inputs are coordinates along the principal directions of the examples, `raw`, or `whitened`: each then as large
    as the others. Targets are ±1 less their mean, of which standardised inputs know nothing. `early` is the first
    step before which the loss has fallen by `fallen` of itself, T that before which `until` of it is left.

    Rows are told apart by `network`, by `inputs`, and by `start`, the scale α of the outputs f = α (g(θ) − g(θ₀)):
    where g is homogeneous of degree k in its weights, a small α is a start from weights that are α^{1/k} as large.
    Of one hidden layer without activations `gap` says nothing: whatever is linear and right at the examples is
    right in their span.

    A. Atanasov, B. Bordelon & C. Pehlevan, "Neural networks as kernel learners: the silent alignment effect" (2021),
    arXiv:2111.00034.
    """

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


FIRST, FOLLOWING = 30, 3
"""So many powers find the largest eigenvalue of the kernel at the start, and follow it from there."""


class LateGeneralising(AbstractTrial):
    """How long after it has fitted its examples a classifier generalises, by the scale α of its outputs:

    The same network learns the same examples at each α.

        fitted         the time at which all examples are classified right
        generalised    the time at which the share `level` of new ones is
        wait           (generalised − fitted)/fitted
        drift          ‖K − K_0‖/‖K_0‖ at either, K the tangent kernel summed over outputs
        accuracy       the largest share of new examples that were classified right, by a network that has fitted
                       its own

    of f = α (g(θ) − g(θ₀)) on the loss ½‖f − y‖², y one-hot less 1/C. Large α makes training lazy, small α rich.
    Time is Σ η over steps θ ← θ − η/(α M) Σᵢ ∇g ℓ′ᵢ that are stable, and so short that none moves the weights by
    more than `stride` of their length. Rows are told apart by `alpha` and `station`, the last of which is the
    `end`. What is not reached before steps run out, or before the loss has fallen to `until` of itself, where
    gradients have died away, has no time.

    T. Kumar, B. Bordelon, S. Gershman & C. Pehlevan, "Grokking as the transition from lazy to rich training dynamics"
    (2023), arXiv:2310.06110. The network, of squares without weight decay, is that of A. Gromov, "Grokking modular
    arithmetic" (2023), arXiv:2301.02679.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    alphas: tuple[float, ...] = Field(min_length=2)
    level: float = Field(0.9, gt=0, le=1)
    steps: Count = 1500
    until: float = Field(1e-4, gt=0)
    fraction: float = Field(0.4, gt=0, lt=1)
    stride: float = Field(0.02, gt=0)
    points: Count = 40

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if len(data.classes) < 2 or not len(data.test.inputs):
            raise Mistake("trial.data: choose data of classes, and leave some for the test, as of modular_addition")
        return [{"alpha": alpha, **row} for alpha in self.alphas for row in self.stations(data, alpha, seed)]

    def stations(self, data: Data, alpha: float, seed: int) -> Iterator[dict[str, Level]]:
        """Learn at one scale, and look at the network where it has fitted, where it generalises, and at the end."""
        x, classes = data.train.inputs, len(data.classes)
        module = self.model.module(self.init, tuple(x.shape[1:]), classes, stream("weights", seed)).eval()
        scaled = ScaledFunction(function_of(module), weights_of(module), alpha)
        fitted, generalised, accuracy = None, None, 0.0
        for moment in self.moments(scaled, x, centred(data.train.target, classes)):
            right = share_right(scaled.outputs(moment.weights, data.test.inputs), data.test.target)
            accuracy = max(accuracy, right)
            if fitted is None and share_right(moment.outputs, data.train.target) == 1:
                fitted = moment
            if generalised is None and right >= self.level:
                generalised = moment
            if fitted and generalised:
                break
        times = [station.time if station else math.nan for station in (fitted, generalised)]
        if not fitted or not moment.outputs.isfinite().all():
            accuracy = math.nan  # what has not learned, or has diverged, is no network that does not generalise
        some = x[: self.points]
        first = tangent_kernel(module, some, weights=scaled.start, outputs="trace")
        for name, station in (("fitted", fitted), ("generalised", generalised), ("end", moment)):
            here = None if station is None else tangent_kernel(module, some, weights=station.weights, outputs="trace")
            yield {
                "station": name,
                "time": math.nan if station is None else station.time,
                "wait": (times[1] - times[0]) / times[0],
                "drift": math.nan if here is None else drift(here, first),
                "accuracy": accuracy,
            }

    def moments(
        self, scaled: ScaledFunction, x: Float[Tensor, "train *shape"], y: Float[Tensor, "train out"]
    ) -> Iterator[Moment]:
        """Every moment, until steps run out or the loss has fallen to a share `until` of itself."""
        followed = FollowedMode(scaled.function, x, y)
        descent, time = ScaledDescent(scaled, x, y, followed.largest, self.fraction, self.stride), 0.0
        for step in descent.path(scaled.start, self.steps):
            yield Moment(time, step.before, step.outputs)
            if step.missed.square().sum() <= self.until * y.square().sum():
                return
            time += step.size


@dataclass(frozen=True)
class Moment:
    """The weights at a time, and what the network says of its examples."""

    time: float
    weights: Weights
    outputs: Float[Tensor, "train out"]


class FollowedMode:
    """The first mode of the kernel J Jᵀ is followed by a few powers from where it was found last."""

    def __init__(self, function: Function, x: Tensor, mode: Float[Tensor, "train out"]) -> None:
        self.function, self.x, self.mode, self.powers = function, x, mode, FIRST

    def largest(self, weights: Weights) -> float:
        """Find its eigenvalue, from below."""
        self.mode, found = top_mode(self.function, weights, self.x, self.mode, self.powers)
        self.powers = FOLLOWING
        return found


def top_mode(
    function: Function, weights: Weights, x: Tensor, mode: Float[Tensor, "train out"], powers: int
) -> tuple[Float[Tensor, "train out"], float]:
    """Follow the first mode of the kernel J Jᵀ, and find its eigenvalue from below, by so many powers.

    >>> import torch
    >>> square = torch.diag(torch.tensor([3.0, 1.0]))
    >>> found = top_mode(lambda w, x: w["w"] * x, {"w": torch.ones(1, 2)}, square, torch.ones(2, 2), powers=20)
    >>> round(found[1], 4)
    9.0
    """

    def outputs(given: Weights) -> Tensor:
        return function(given, x)

    load_forward_mode()
    size, plain = 0.0, {name: weight.detach() for name, weight in weights.items()}
    for _ in range(powers):
        (gradient,) = vjp(outputs, plain)[1](mode)
        image: Tensor = jvp(outputs, (plain,), (gradient,))[1]
        size = float(image.norm() / mode.norm())
        mode = image / image.norm()
    return mode, size


def share_right(outputs: Float[Tensor, "point out"], labels: Tensor) -> float:
    """The share of points whose largest output is that of their label."""
    return float((outputs.argmax(1) == labels).double().mean()) if outputs.isfinite().all() else 0.0
