"""The descent: a stream of steps, each a segment of weight space with what the kernel machine needs of it.

The gradient of a step is Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s), taken from the same features that make the right side of the kernel.
ℓ′ᵢ includes the weight wᵢ of its example, and is zero for an example outside the step's batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.secant.segment import Segment, point
from ntkexp.loss.base import AbstractLoss
from ntkexp.optimizer.arc import Arc
from ntkexp.optimizer.base import AbstractOptimizer, Memory, Sizes
from ntkexp.path.points import Points
from ntkexp.path.rule.gauss import Gauss
from ntkexp.schedule.base import AbstractSchedule
from ntkexp.shapes import Weights

IMPULSE_NODES = 3  # of order 6, above that of the arcs


@dataclass(frozen=True)
class Step:
    """From θ_s to θ_{s+1}, with f(θ_s) at all points, the features of the training examples, and their wᵢ ∂ℓ/∂f,
    times the factor `clipping` by which the gradient was shortened.

    Every weight has a step size of its own, the step's times its factor; `memory` is the optimizer's after the step.
    """

    index: int
    step_size: float
    factors: Mapping[str, float]
    weight_decay: float
    segment: Segment
    memory: Memory
    outputs: Float[Tensor, "point out"]
    right: list[Features]
    output_gradient: Float[Tensor, "train out"]
    clipping: float
    arcs: tuple[Arc, ...] = ()

    @cached_property
    def steered(self) -> list[Features]:
        """The features of the training examples, each weight's part times its factor of the step size."""
        if all(factor == 1 for factor in self.factors.values()):
            return self.right
        return [block.scaled(self.factors) for block in self.right]

    @cached_property
    def decay(self) -> Weights | None:
        """λη ⊙ θ_s, by which the weights shrink in a step without memory."""
        return decay(self.segment.start, self.weight_decay, sizes(self.factors, self.step_size))


@dataclass(frozen=True)
class Descent:
    """Training by small steps on a fixed set of examples."""

    points: Points
    targets: Float[Tensor, "train out"]
    loss: AbstractLoss
    scale: float  # multiplies the loss: 1/α² where the network is centred
    optimizer: AbstractOptimizer
    factors: Mapping[str, float]  # of the step size, by weight
    schedule: AbstractSchedule
    step_size: float
    steps: int
    seed: int

    def walk(self, weights: Weights, memory: Memory | None = None, done: int = 0) -> Iterator[Step]:
        """The steps from these weights on, when so many are done."""
        for index in range(done, self.steps):
            step = self.step(index, weights, memory or {})
            yield step
            weights, memory = step.segment.end, step.memory

    def step(self, index: int, weights: Weights, memory: Memory) -> Step:
        """One step."""
        outputs, right = self.points.read(weights)
        output_gradient = self.output_gradient(index, outputs[: self.points.train])
        gradient = total(right, output_gradient, weights)
        clipping = self.optimizer.clipping(gradient)
        if clipping < 1:
            gradient = {name: part * clipping for name, part in gradient.items()}
            output_gradient = output_gradient * clipping
        step_size = self.size(index)
        field = partial(self.gradient, index)
        move = self.optimizer.move(index, weights, gradient, field, sizes(self.factors, step_size), memory)
        segment = Segment(weights, move.weights, self.points.reader.trained)
        return Step(
            index,
            step_size,
            self.factors,
            self.optimizer.weight_decay,
            segment,
            move.memory,
            outputs,
            right,
            output_gradient,
            clipping,
            move.arcs,
        )

    def gradient(self, index: int, weights: Weights) -> Weights:
        """∇L at other weights than those at which a step begins."""
        outputs, right = self.points.read_train(weights)
        return total(right, self.output_gradient(index, outputs), weights)

    def moments(self, step: Step, nodes: int) -> Iterator[Step]:
        """Gauss nodes on the arcs of a step: steps that lead nowhere, each as long as its node counts."""
        quadrature = Gauss().quadrature(nodes, 1, 0)
        for arc in step.arcs:
            for node in quadrature:
                weights = arc.at(node.start)
                outputs, right = self.points.read_train(weights)
                yield replace(
                    step,
                    step_size=step.step_size * arc.length * node.weight,
                    segment=point(weights, self.points.reader.trained),
                    outputs=outputs,
                    right=right,
                    output_gradient=self.output_gradient(step.index, outputs),
                    arcs=(),
                )

    def impulse(self, step: Step) -> Float[Tensor, "train out"]:
        """ηℓ′, or ∫ℓ′dt over the arcs."""
        if not step.arcs:
            return step.step_size * step.output_gradient
        parts = [moment.step_size * moment.output_gradient for moment in self.moments(step, IMPULSE_NODES)]
        return torch.stack(parts).sum(0)

    def size(self, index: int) -> float:
        """η_s."""
        return self.step_size * self.schedule.factor(index, self.steps)

    def output_gradient(self, index: int, outputs: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        """ℓ′ᵢ, with its weight; an example drawn twice counts twice."""
        derivative = self.loss.output_gradient(outputs, self.targets)
        batch = self.optimizer.batch_indices(index, self.points.train, self.seed)
        if batch is None:
            return derivative * (self.loss.weight(self.points.train) * self.scale)
        times = torch.bincount(batch, minlength=self.points.train).to(derivative)
        return derivative * times[:, None] * (self.loss.weight(len(batch)) * self.scale)


def sizes(factors: Mapping[str, float], step_size: float) -> Sizes:
    """The step size of every weight."""
    return {name: step_size * factor for name, factor in factors.items()}


def decay(weights: Weights, weight_decay: float, sizes: Sizes) -> Weights | None:
    """λη ⊙ θ, or nothing."""
    if not weight_decay:
        return None
    return {name: weight * (weight_decay * sizes[name]) for name, weight in weights.items()}


def total(right: list[Features], output_gradient: Float[Tensor, "train out"], weights: Weights) -> Weights:
    """Σᵢ J(xᵢ)ᵀℓ′ᵢ over all blocks of training examples."""
    parts = torch.split(output_gradient, [block.examples for block in right])
    return reduce(added, (block.weighted(part).total(weights) for block, part in zip(right, parts, strict=True)))


def added(gradient: Weights, other: Weights) -> Weights:
    """The sum, in the place of the first: two gradients are held at a time, however many blocks there are."""
    return {name: value.add_(other[name]) for name, value in gradient.items()}
