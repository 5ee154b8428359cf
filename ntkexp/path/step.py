"""One training step as input of the sums along a path,
and a training run as a stream of steps.

A phase is a range of steps that trains on only some of the training examples.

>>> first, second = phases_of((300, 200), (20, 30))
>>> second
Phase(start=300, stop=500, examples=slice(20, 50, None))
>>> second.count, phase_at((first, second), 299) is first, phase_at((first, second), 500) is second
(30, True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel import Jacobian, Segment
from ntkexp.loss import AbstractLoss
from ntkexp.optimizer.base import AbstractOptimizer, Arc, Memory, Sizes
from ntkexp.path.points import NetworkView, Points, total_gradient
from ntkexp.path.rule.base import Gauss
from ntkexp.schedule import AbstractSchedule
from ntkexp.shapes import Weights

# --- One step of training, from θ_s to θ_{s+1}, along the gradient
# Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s).
#
# ℓ′ᵢ is the derivative of the loss by the outputs of example i. It includes the weight
# wᵢ of the example in the loss, and the factor of gradient clipping. It is zero for an
# example outside the step's batch. The step size of a parameter is the step size of the
# step, times a factor of the parameter.


# Number of Gauss points on each arc (polynomial piece) of a gradient flow. The order of
# accuracy of this quadrature is 6. The order of the arcs is lower.
IMPULSE_POINTS = 3


class Curve(NamedTuple):
    """A step along a gradient flow: the arcs (polynomial pieces) of its path, and ℓ′ as
    a function of the outputs at the training examples."""

    arcs: tuple[Arc, ...]
    output_gradient: Callable[[Float[Tensor, "train out"]], Float[Tensor, "train out"]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step: the network before the step, the weights after it, ℓ′
    (`output_gradient`), and the optimizer's state after the step."""

    index: int
    view: NetworkView  # the network at the weights θ_s before the step
    end: Weights
    output_gradient: Float[Tensor, "train out"]
    step_size: float
    # factor of each parameter's step size; 1 if missing
    factors: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    # the optimizer's state after the step
    memory: Memory = field(default_factory=dict)
    clipping: float = 1.0
    # arcs of a gradient flow, or None if the step is a straight line
    curve: Curve | None = None

    @cached_property
    def segment(self) -> Segment:
        """The straight line from the weights before the step
        to the weights after it."""
        return Segment(self.view.weights, self.end, self.view.points.reader.trained)

    @cached_property
    def right_factor(self) -> list[Jacobian]:
        """The right factor of the kernel: J(θ_s; xᵢ),
        scaled by the step-size factor of each parameter.

        If only contributions are computed, it is the gradient Σ_c ℓ′_c J_c instead, in
        the form of a Jacobian with one output per example."""
        view = self.view
        if view.points.makes_kernels:
            blocks = view.train_jacobians
        else:
            blocks = list(view.loss_gradients(self.output_gradient))
        if any(factor != 1 for factor in self.factors.values()):
            return [block.scaled(self.factors) for block in blocks]
        return blocks

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.view.weights, self.factors, self.step_size)

    @cached_property
    def decay(self) -> Weights | None:
        """The vector λη ⊙ θ_s, which decay subtracts from the weights in a step without
        momentum. λ is the weight decay, and η holds the step sizes. None if λ = 0."""
        return decay(self.view.weights, self.weight_decay, self.sizes)

    @cached_property
    def impulse(self) -> Float[Tensor, "train out"]:
        """The product ηℓ′ of the step size and ℓ′. For a step of a gradient flow, it is
        the integral ∫ℓ′dt over the step."""
        if self.curve is None:
            return self.step_size * self.output_gradient
        points = self.quadrature_points(IMPULSE_POINTS)
        terms = [point.step_size * point.output_gradient for point in points]
        return torch.stack(terms).sum(0)

    def quadrature_points(self, count: int) -> Iterator[Step]:
        """Yield `count` Gauss points on each arc of a gradient flow, in order of time.

        Each point is a step from some weights to the same weights. Its step size is the
        weight of the point in the quadrature.
        """
        if self.curve is None:
            return
        quadrature = Gauss().quadrature(count, 1, 0)
        for arc in self.curve.arcs:
            for substep in quadrature:
                view = NetworkView(self.view.points, arc.at(substep.start))
                yield replace(
                    self,
                    view=view,
                    end=view.weights,
                    output_gradient=self.curve.output_gradient(view.train_outputs),
                    step_size=self.step_size * arc.length * substep.weight,
                    curve=None,
                )


def sizes_of(weights: Weights, factors: Mapping[str, float], step_size: float) -> Sizes:
    """Return the step size of each parameter.

    >>> sizes_of({"body": 0, "head": 0}, {"head": 0.5}, 0.2)
    {'body': 0.2, 'head': 0.1}
    """
    return {name: step_size * factors.get(name, 1.0) for name in weights}


def decay(weights: Weights, weight_decay: float, sizes: Sizes) -> Weights | None:
    """Return λη ⊙ θ for the step sizes η, or None if the weight decay λ is zero."""
    if not weight_decay:
        return None
    return {
        name: weight * (weight_decay * sizes[name]) for name, weight in weights.items()
    }


@dataclass(frozen=True)
class Phase:
    """The training examples that are used from step `start` to step `stop` − 1."""

    start: int
    stop: int
    examples: slice

    @property
    def count(self) -> int:
        return int(self.examples.stop - self.examples.start)


def phases_of(steps: Sequence[int], examples: Sequence[int]) -> tuple[Phase, ...]:
    """Return consecutive phases with the given numbers of steps and examples."""
    phases: list[Phase] = []
    step = example = 0
    for length, learned in zip(steps, examples, strict=True):
        phases.append(Phase(step, step + length, slice(example, example + learned)))
        step += length
        example += learned
    return tuple(phases)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase that contains a step.
    Steps after all phases belong to the last phase."""
    return next((phase for phase in phases if step < phase.stop), phases[-1])


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The settings of a training run without the network: targets, loss,
    optimizer, schedule."""

    targets: Float[Tensor, "train out"]
    loss: AbstractLoss
    scale: float  # factor of the loss: 1/α² for `init.centred`, else 1
    optimizer: AbstractOptimizer
    factors: Mapping[str, float]  # step-size factor of each parameter
    schedule: AbstractSchedule
    step_size: float  # step size before the schedule
    steps: int  # number of steps in the schedule
    seed: int  # seed of the batches

    def step_size_at(self, index: int) -> float:
        """Return the step size η_s."""
        return self.step_size * self.schedule.factor(index, self.steps)


# --- Training on a fixed set of examples, as a stream of steps.
#
# The gradient of a step, Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s), is computed from the Jacobians that are
# also the right factor of the step's kernel. In each phase, batches are drawn from the
# examples of the phase only, and losses are averaged over the batch. For all other
# examples, ℓ′ is zero. The optimizer keeps its state from phase to phase.


@dataclass(frozen=True, kw_only=True)
class Descent(TrainingRecipe):
    """A training run. `points` holds the network and the training examples."""

    points: Points
    # training phases; empty: one phase with all examples
    phases: tuple[Phase, ...] = ()

    def steps_from(
        self, weights: Weights, memory: Memory | None = None, done: int = 0
    ) -> Iterator[Step]:
        """Train from these weights, after `done` earlier steps, and yield each step."""
        for index in range(done, self.steps):
            step = self.step(index, weights, memory or {})
            yield step
            weights, memory = step.end, step.memory

    def step(self, index: int, weights: Weights, memory: Memory) -> Step:
        """Compute one training step from these weights and this optimizer state."""
        # ℓ′ at the outputs, and the gradient Σᵢ J(xᵢ)ᵀ ℓ′ᵢ
        view = NetworkView(self.points, weights)
        output_gradient = self.output_gradient(index, view.train_outputs)
        gradient = total_gradient(view.loss_gradients(output_gradient), weights)

        # clip ℓ′ and the gradient by the same factor
        clipping = self.optimizer.clipping(gradient)
        if clipping < 1:
            gradient = {name: part * clipping for name, part in gradient.items()}
            output_gradient = output_gradient * clipping

        # Update the weights. A gradient flow evaluates ∇L along the arcs of its curved
        # path (`Arc`).
        size = self.step_size_at(index)
        sizes = sizes_of(weights, self.factors, size)
        vector_field = partial(self.gradient, index)
        move = self.optimizer.move(
            index, weights, gradient, vector_field, sizes, memory
        )
        curve = None
        if move.arcs:
            curve = Curve(move.arcs, partial(self.output_gradient, index))
        return Step(
            index=index,
            view=view,
            end=move.weights,
            output_gradient=output_gradient,
            step_size=size,
            factors=self.factors,
            weight_decay=self.optimizer.weight_decay,
            memory=move.memory,
            clipping=clipping,
            curve=curve,
        )

    def gradient(self, index: int, weights: Weights) -> Weights:
        """Return the gradient ∇L of the step's batch at any weights."""
        view = NetworkView(self.points, weights)
        output_gradient = self.output_gradient(index, view.train_outputs)
        return total_gradient(view.loss_gradients(output_gradient), weights)

    def weight(self, examples: int) -> float:
        """Return the weight wᵢ of each example in a step on n examples."""
        return self.loss.weight(examples) * self.scale

    def phase(self, index: int) -> Phase:
        """Return the phase of a step. Without phases,
        return one phase with all examples."""
        whole = Phase(0, self.steps, slice(0, self.points.train))
        return phase_at(self.phases or (whole,), index)

    def output_gradient(
        self, index: int, outputs: Float[Tensor, "train out"]
    ) -> Float[Tensor, "train out"]:
        """Return wᵢℓ′ᵢ for the batch of a step: the weight of each example times the
        gradient of its loss at the outputs.

        An example that was drawn twice counts twice. Examples of other phases get zero.
        """
        derivative = self.loss.output_gradient(outputs, self.targets)
        phase = self.phase(index)
        batch = self.optimizer.batch_indices(
            index - phase.start, phase.count, self.seed
        )
        if batch is None and phase.count == self.points.train:
            return derivative * self.weight(phase.count)
        times = derivative.new_zeros(self.points.train)
        if batch is None:
            times[phase.examples] = 1.0
            return derivative * times[:, None] * self.weight(phase.count)
        times[phase.examples] = torch.bincount(batch, minlength=phase.count).to(
            derivative
        )
        return derivative * times[:, None] * self.weight(len(batch))
