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

from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jvp, vjp

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.limit_regression import centred
from ntkexp.claim.trial.scaled_descent import ScaledDescent, ScaledFunction
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

FIRST, FOLLOWING = 30, 3
"""So many powers find the largest eigenvalue of the kernel at the start, and follow it from there."""


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
