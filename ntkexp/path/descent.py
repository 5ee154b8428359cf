"""The descent: a stream of steps, each a segment of weight space with what the kernel machine needs of it.

The gradient of a step is Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s), taken from the same features that make the right side of the kernel.
ℓ′ᵢ includes the weight wᵢ of its example, and is zero for an example outside the step's batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features import Features
from ntkexp.kernel.segment import Segment
from ntkexp.loss.base import AbstractLoss
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.points import Points
from ntkexp.schedule.base import AbstractSchedule
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class Step:
    """From θ_s to θ_{s+1}, with f(θ_s) at all points, the features of the training examples, and their wᵢ ∂ℓ/∂f."""

    index: int
    step_size: float
    segment: Segment
    outputs: Float[Tensor, "point out"]
    right: list[Features]
    output_gradient: Float[Tensor, "train out"]


@dataclass(frozen=True)
class Descent:
    """Training by small steps on a fixed set of examples."""

    points: Points
    targets: Float[Tensor, "train out"]
    loss: AbstractLoss
    scale: float  # multiplies the loss: 1/α² where the network is centred
    optimizer: AbstractOptimizer
    schedule: AbstractSchedule
    step_size: float
    steps: int
    seed: int

    def walk(self, weights: Weights, done: int = 0) -> Iterator[Step]:
        """The steps from these weights on, when so many are done."""
        for index in range(done, self.steps):
            step = self.step(index, weights)
            yield step
            weights = step.segment.end

    def step(self, index: int, weights: Weights) -> Step:
        """One step."""
        outputs, right = self.points.read(weights)
        output_gradient = self.output_gradient(index, outputs[: self.points.train])
        gradient = total(right, output_gradient, weights)
        step_size = self.step_size * self.schedule.factor(index, self.steps)
        after = self.optimizer.update(weights, gradient, step_size)
        segment = Segment(weights, after, self.points.reader.trained)
        return Step(index, step_size, segment, outputs, right, output_gradient)

    def output_gradient(self, index: int, outputs: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        """ℓ′ᵢ, with its weight; an example drawn twice counts twice."""
        derivative = self.loss.output_gradient(outputs, self.targets)
        batch = self.optimizer.batch_indices(index, self.points.train, self.seed)
        if batch is None:
            return derivative * (self.loss.weight(self.points.train) * self.scale)
        times = torch.bincount(batch, minlength=self.points.train).to(derivative)
        return derivative * times[:, None] * (self.loss.weight(len(batch)) * self.scale)


def total(right: list[Features], output_gradient: Float[Tensor, "train out"], weights: Weights) -> Weights:
    """Σᵢ J(xᵢ)ᵀℓ′ᵢ over all blocks of training examples."""
    parts = torch.split(output_gradient, [block.examples for block in right])
    return reduce(added, (block.weighted(part).total(weights) for block, part in zip(right, parts, strict=True)))


def added(gradient: Weights, other: Weights) -> Weights:
    """The sum, in the place of the first: two gradients are held at a time, however many blocks there are."""
    return {name: value.add_(other[name]) for name, value in gradient.items()}
