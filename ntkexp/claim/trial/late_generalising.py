"""How long after it has fitted its examples a classifier generalises, by the scale α of its outputs:

    fitted         the time at which all examples are classified right
    generalised    the time at which the share `level` of new ones is
    wait           (generalised − fitted)/fitted
    drift          ‖K − K_0‖/‖K_0‖ at either, K the tangent kernel summed over outputs
    accuracy       the largest share of new examples that were classified right, by a network that has fitted its own

of f = α (g(θ) − g(θ₀)) on the loss ½‖f − y‖², y one-hot less 1/C. Large α makes training lazy, small α rich. Time is
Σ η over steps θ ← θ − η/(α M) Σᵢ ∇g ℓ′ᵢ that are stable, and so short that none moves the weights by more than `stride`
of their length. Rows are told apart by `alpha` and `station`, the last of which is the `end`. What is not reached
before steps run out, or before the loss has fallen to `until` of itself, where gradients have died away, has no time.

T. Kumar, B. Bordelon, S. Gershman & C. Pehlevan, "Grokking as the transition from lazy to rich training dynamics"
(2023), arXiv:2310.06110. The network, of squares without weight decay, is that of A. Gromov, "Grokking modular
arithmetic" (2023), arXiv:2301.02679.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jvp, vjp

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.limit_regression import centred
from ntkexp.claim.trial.task_by_task import length
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data
from ntkexp.diagnostics.drift import drift
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.init.base import AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.functional import function_of, weights_of
from ntkexp.records.sweep import Level
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

REFRESH = 20
"""The largest eigenvalue of the kernel is followed by a few powers after so many steps."""


class LateGeneralising(AbstractTrial):
    """The same network learns the same examples at each α."""

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
        path = Classifier(function_of(module), weights_of(module), alpha, x, centred(data.train.target, classes))
        fitted, generalised, accuracy = None, None, 0.0
        for moment in path.descent(self.steps, self.fraction, self.stride, self.until):
            right = share_right(path.outputs(moment.weights, data.test.inputs), data.test.target)
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
        first = tangent_kernel(module, some, weights=path.start, outputs="trace")
        for name, station in (("fitted", fitted), ("generalised", generalised), ("end", moment)):
            here = None if station is None else tangent_kernel(module, some, weights=station.weights, outputs="trace")
            yield {
                "station": name,
                "time": math.nan if station is None else station.time,
                "wait": (times[1] - times[0]) / times[0],
                "drift": math.nan if here is None else drift(here, first),
                "accuracy": accuracy,
            }


@dataclass(frozen=True)
class Moment:
    """The weights at a time, and what the network says of its examples."""

    time: float
    weights: Weights
    outputs: Float[Tensor, "train out"]


@dataclass(frozen=True)
class Classifier:
    """A function of weights, scaled and without its first outputs, with what it is to say of examples."""

    function: Function
    start: Weights
    alpha: float
    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, "train out"]

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, "point out"]:
        """Outputs, which are zero at the start."""
        with torch.no_grad():
            return self.alpha * (self.function(weights, x) - self.function(self.start, x))

    def descent(self, steps: int, fraction: float, stride: float, until: float) -> Iterator[Moment]:
        """Every moment, until steps run out or the loss has fallen to a share `until` of itself."""
        weights = {name: weight.detach().clone() for name, weight in self.start.items()}
        first, time, mode, largest = self.function(self.start, self.inputs).detach(), 0.0, self.targets, 0.0
        for step in range(steps):
            if step % REFRESH == 0:
                mode, largest = top_mode(self.function, weights, self.inputs, mode, powers=3 if step else 30)
            leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
            outputs = self.alpha * (self.function(leaves, self.inputs) - first)
            missed = (outputs - self.targets).detach()
            yield Moment(time, {name: weight.detach() for name, weight in weights.items()}, outputs.detach())
            if missed.square().sum() <= until * self.targets.square().sum():
                return
            moves = torch.autograd.grad((outputs * missed).sum() / len(missed), list(leaves.values()))
            size = fraction * 2 * len(missed) / largest
            longest = stride * float(length(leaves.values()) / length(moves)) * self.alpha**2
            size = min(size, longest)
            time += size
            pairs = zip(leaves.items(), moves, strict=True)
            weights = {name: leaf.detach() - size / self.alpha**2 * move for (name, leaf), move in pairs}


def top_mode(
    function: Function, weights: Weights, x: Tensor, mode: Float[Tensor, "train out"], powers: int
) -> tuple[Float[Tensor, "train out"], float]:
    """Follow the first mode of the kernel J Jᵀ, and find its eigenvalue from below, by so many powers.

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
