"""One step of training, which is all that a reading of the path sees, and the descent as a stream of steps.

Phases of training: stretches of steps, in each of which some of the training examples alone carry gradient.

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
from ntkexp.path.points import NetworkView, Points, summed
from ntkexp.path.rule.base import Gauss
from ntkexp.schedule import AbstractSchedule
from ntkexp.shapes import Weights

# --- One step of training: all that the sums along the path see.
#
# From θ_s to θ_{s+1}, along the gradient Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s). ℓ′ᵢ includes the weight wᵢ of its example and the
# factor by which the gradient was shortened, and is zero for an example outside the step's batch. Every weight
# has a step size of its own, the step's times its factor.


IMPULSE_NODES = 3  # of order 6, above that of the arcs


class Curve(NamedTuple):
    """The arcs of a step that is not straight, and ℓ′ as a function of the outputs at the training examples."""

    arcs: tuple[Arc, ...]
    output_gradient: Callable[[Float[Tensor, "train out"]], Float[Tensor, "train out"]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The network before the step, the weights after it, ℓ′, and what the optimizer made of the gradient."""

    index: int
    view: NetworkView  # at θ_s
    end: Weights
    output_gradient: Float[Tensor, "train out"]
    step_size: float
    factors: Mapping[str, float] = field(
        default_factory=dict
    )  # of the step size, by weight; 1 where there is none
    weight_decay: float = 0.0
    memory: Memory = field(default_factory=dict)  # of past gradients, after the step
    clipping: float = 1.0
    curve: Curve | None = None  # where the way is not straight

    @cached_property
    def segment(self) -> Segment:
        """The way, if it is straight."""
        return Segment(self.view.weights, self.end, self.view.points.reader.trained)

    @cached_property
    def side(self) -> list[Jacobian]:
        """What kernels of the step are with, each weight's part times its factor of the step size: J(θ_s; xᵢ), or where
        contributions alone are summed up, the gradients of the examples, Σ_c ℓ′_c J_c, as one output of each.
        """
        view, points = self.view, self.view.points
        blocks = view.right if points.makes_kernels else view.pulled(self.output_gradient)
        if any(factor != 1 for factor in self.factors.values()):
            blocks = [block.scaled(self.factors) for block in blocks]
        return list(blocks)

    @property
    def sizes(self) -> Sizes:
        """The step size of every weight."""
        return sizes_of(self.view.weights, self.factors, self.step_size)

    @cached_property
    def decay(self) -> Weights | None:
        """λη ⊙ θ_s, by which the weights shrink in a step without memory."""
        return decay(self.view.weights, self.weight_decay, self.sizes)

    @cached_property
    def impulse(self) -> Float[Tensor, "train out"]:
        """ηℓ′, or ∫ℓ′dt along a curve."""
        if self.curve is None:
            return self.step_size * self.output_gradient
        return torch.stack(
            [node.step_size * node.output_gradient for node in self.nodes(IMPULSE_NODES)]
        ).sum(0)

    def nodes(self, count: int) -> Iterator[Step]:
        """So many Gauss nodes on every arc of a curve, in the order of time: steps that lead nowhere, each as long as
        its node counts.
        """
        if self.curve is None:
            return
        quadrature = Gauss().quadrature(count, 1, 0)
        for arc in self.curve.arcs:
            for piece in quadrature:
                view = NetworkView(self.view.points, arc.at(piece.start))
                yield replace(
                    self,
                    view=view,
                    end=view.weights,
                    output_gradient=self.curve.output_gradient(view.train_outputs),
                    step_size=self.step_size * arc.length * piece.weight,
                    curve=None,
                )


def sizes_of(weights: Weights, factors: Mapping[str, float], step_size: float) -> Sizes:
    """The step size of every weight.

    >>> sizes_of({"body": 0, "head": 0}, {"head": 0.5}, 0.2)
    {'body': 0.2, 'head': 0.1}
    """
    return {name: step_size * factors.get(name, 1.0) for name in weights}


def decay(weights: Weights, weight_decay: float, sizes: Sizes) -> Weights | None:
    """λη ⊙ θ, or nothing."""
    if not weight_decay:
        return None
    return {name: weight * (weight_decay * sizes[name]) for name, weight in weights.items()}


@dataclass(frozen=True)
class Phase:
    """These training examples are learned from step `start` until before step `stop`."""

    start: int
    stop: int
    examples: slice

    @property
    def count(self) -> int:
        """How many examples these are."""
        return int(self.examples.stop - self.examples.start)


def phases_of(steps: Sequence[int], examples: Sequence[int]) -> tuple[Phase, ...]:
    """Phases one after the other, each with its numbers of steps and examples."""
    phases: list[Phase] = []
    step = example = 0
    for taken, learned in zip(steps, examples, strict=True):
        phases.append(Phase(step, step + taken, slice(example, example + learned)))
        step, example = step + taken, example + learned
    return tuple(phases)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase that a step belongs to; what comes after the last step belongs to the last phase."""
    return next((phase for phase in phases if step < phase.stop), phases[-1])


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Everything that decides a training but the network: targets, loss, optimizer and schedule."""

    targets: Float[Tensor, "train out"]
    loss: AbstractLoss
    scale: float  # multiplies the loss: 1/α² where the network is centred
    optimizer: AbstractOptimizer
    factors: Mapping[str, float]  # of the step size, by weight
    schedule: AbstractSchedule
    step_size: float  # before the schedule
    steps: int  # of the schedule
    seed: int  # of the batches

    def size(self, index: int) -> float:
        """Return the step size η_s."""
        return self.step_size * self.schedule.factor(index, self.steps)


# --- The descent: training by small steps on a fixed set of examples, as a stream of steps.
#
# The gradient of a step is Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s), taken from the same Jacobians that make the right side of the
# kernel. Where there are phases, ℓ′ᵢ is zero for examples of another phase than the step's; each phase draws its
# batches, and takes its means, as if its examples were all. What the optimizer remembers is carried over from
# phase to phase.


@dataclass(frozen=True, kw_only=True)
class Descent(TrainingRecipe):
    """A training of the network at `points`, whose first ones are the training examples."""

    points: Points
    phases: tuple[Phase, ...] = ()  # none: all examples are learned in every step

    def walk(self, weights: Weights, memory: Memory | None = None, done: int = 0) -> Iterator[Step]:
        """The steps from these weights on, after `done` steps."""
        for index in range(done, self.steps):
            step = self.step(index, weights, memory or {})
            yield step
            weights, memory = step.end, step.memory

    def step(self, index: int, weights: Weights, memory: Memory) -> Step:
        """One step."""
        # ℓ′ at the outputs, and the gradient Σᵢ J(xᵢ)ᵀ ℓ′ᵢ
        view = NetworkView(self.points, weights)
        output_gradient = self.output_gradient(index, view.train_outputs)
        gradient = summed(view.pulled(output_gradient), weights)

        # both are shortened where the gradient is too long
        clipping = self.optimizer.clipping(gradient)
        if clipping < 1:
            gradient = {name: part * clipping for name, part in gradient.items()}
            output_gradient = output_gradient * clipping

        # where the optimizer takes the weights; a flow asks for ∇L on its way
        size = self.size(index)
        sizes = sizes_of(weights, self.factors, size)
        move = self.optimizer.move(
            index, weights, gradient, partial(self.gradient, index), sizes, memory
        )
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
            curve=Curve(move.arcs, partial(self.output_gradient, index)) if move.arcs else None,
        )

    def gradient(self, index: int, weights: Weights) -> Weights:
        """∇L at other weights than those at which a step begins."""
        view = NetworkView(self.points, weights)
        return summed(view.pulled(self.output_gradient(index, view.train_outputs)), weights)

    def weight(self, examples: int) -> float:
        """The weight wᵢ of each example in a step on n examples."""
        return self.loss.weight(examples) * self.scale

    def phase(self, index: int) -> Phase:
        """What is learned in a step."""
        return phase_at(self.phases or (Phase(0, self.steps, slice(0, self.points.train)),), index)

    def output_gradient(
        self, index: int, outputs: Float[Tensor, "train out"]
    ) -> Float[Tensor, "train out"]:
        """ℓ′ᵢ, with its weight; an example drawn twice counts twice, one of another phase not at all."""
        derivative, phase = self.loss.output_gradient(outputs, self.targets), self.phase(index)
        batch = self.optimizer.batch_indices(index - phase.start, phase.count, self.seed)
        if batch is None and phase.count == self.points.train:
            return derivative * self.weight(phase.count)
        times = derivative.new_zeros(self.points.train)
        times[phase.examples] = (
            1.0 if batch is None else torch.bincount(batch, minlength=phase.count).to(derivative)
        )
        return (
            derivative * times[:, None] * self.weight(phase.count if batch is None else len(batch))
        )
