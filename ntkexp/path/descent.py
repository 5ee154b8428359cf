"""The descent: training by small steps on a fixed set of examples, as a stream of steps.

The gradient of a step is Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s), taken from the same features that make the right side of the kernel.
Where there are phases, ℓ′ᵢ is zero for examples of another phase than the step's; each phase draws its batches, and
takes its means, as if its examples were all. What the optimizer remembers is carried over from phase to phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.loss.base import AbstractLoss
from ntkexp.optimizer.arc import Arc
from ntkexp.optimizer.base import AbstractOptimizer, Memory, Move
from ntkexp.path.curve import Curve
from ntkexp.path.gradient import summed
from ntkexp.path.network_view import NetworkView
from ntkexp.path.phase import Phase, phase_at
from ntkexp.path.points import Points
from ntkexp.path.step import Step, sizes_of
from ntkexp.schedule.base import AbstractSchedule
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class Descent:
    """What is trained on what, and how."""

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
    phases: tuple[Phase, ...] = ()  # none: all examples are learned in every step

    def walk(self, weights: Weights, memory: Memory | None = None, done: int = 0) -> Iterator[Step]:
        """The steps from these weights on, when so many are done."""
        for index in range(done, self.steps):
            step = self.step(index, weights, memory or {})
            yield step
            weights, memory = step.end, step.memory

    def step(self, index: int, weights: Weights, memory: Memory) -> Step:
        """One step."""
        view = NetworkView(self.points, weights)
        output_gradient = self.output_gradient(index, view.train_outputs)
        gradient = summed(view.pulled(output_gradient), weights)
        clipping = self.optimizer.clipping(gradient)
        if clipping < 1:
            gradient = {name: part * clipping for name, part in gradient.items()}
            output_gradient = output_gradient * clipping
        move = self.move(index, weights, gradient, memory)
        return Step(
            index=index,
            view=view,
            end=move.weights,
            output_gradient=output_gradient,
            step_size=self.size(index),
            factors=self.factors,
            weight_decay=self.optimizer.weight_decay,
            memory=move.memory,
            clipping=clipping,
            curve=self.curve(index, move.arcs),
        )

    def move(self, index: int, weights: Weights, gradient: Weights, memory: Memory) -> Move:
        """Where the optimizer takes the weights with this gradient."""
        field, sizes = partial(self.gradient, index), sizes_of(weights, self.factors, self.size(index))
        return self.optimizer.move(index, weights, gradient, field, sizes, memory)

    def curve(self, index: int, arcs: tuple[Arc, ...]) -> Curve | None:
        """The way of a step that is made of arcs."""
        return Curve(arcs, self.points, partial(self.output_gradient, index)) if arcs else None

    def gradient(self, index: int, weights: Weights) -> Weights:
        """∇L at other weights than those at which a step begins."""
        view = NetworkView(self.points, weights)
        return summed(view.pulled(self.output_gradient(index, view.train_outputs)), weights)

    def size(self, index: int) -> float:
        """η_s."""
        return self.step_size * self.schedule.factor(index, self.steps)

    @property
    def weight(self) -> float:
        """wᵢ of full-batch training on all examples."""
        return self.weight_of(self.points.train)

    def weight_of(self, examples: int) -> float:
        """wᵢ of a step on so many examples."""
        return self.loss.weight(examples) * self.scale

    def phase(self, index: int) -> Phase:
        """What is learned in a step."""
        return phase_at(self.phases or (Phase(0, self.steps, slice(0, self.points.train)),), index)

    def output_gradient(self, index: int, outputs: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        """ℓ′ᵢ, with its weight; an example drawn twice counts twice, one of another phase not at all."""
        derivative, phase = self.loss.output_gradient(outputs, self.targets), self.phase(index)
        batch = self.optimizer.batch_indices(index - phase.start, phase.count, self.seed)
        if batch is None and phase.count == self.points.train:
            return derivative * self.weight
        times = derivative.new_zeros(self.points.train)
        times[phase.examples] = 1.0 if batch is None else torch.bincount(batch, minlength=phase.count).to(derivative)
        size = phase.count if batch is None else len(batch)
        return derivative * times[:, None] * self.weight_of(size)
