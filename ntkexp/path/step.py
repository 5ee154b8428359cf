"""One step of training, which is all that a reading of the path sees, whoever takes it.

From θ_s to θ_{s+1}, along the gradient Σᵢ J(θ_s; xᵢ)ᵀ ℓ′ᵢ(s). ℓ′ᵢ includes the weight wᵢ of its example and the factor
by which the gradient was shortened, and is zero for an example outside the step's batch. Every weight has a step size
of its own, the step's times its factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.secant.segment import Segment
from ntkexp.optimizer.base import Memory, Sizes
from ntkexp.path.curve import Curve
from ntkexp.path.gradient import summed, total, unit
from ntkexp.path.network_view import NetworkView
from ntkexp.path.right_side import AbstractRightSide, right_side
from ntkexp.shapes import Weights

IMPULSE_NODES = 3  # of order 6, above that of the arcs


@dataclass(frozen=True, kw_only=True)
class Step:
    """The network before the step, the weights after it, ℓ′, and what the optimizer made of the gradient."""

    index: int
    view: NetworkView  # at θ_s
    end: Weights
    output_gradient: Float[Tensor, "train out"]
    step_size: float
    factors: Mapping[str, float] = field(default_factory=dict)  # of the step size, by weight; 1 where there is none
    weight_decay: float = 0.0
    memory: Memory = field(default_factory=dict)  # of past gradients, after the step
    clipping: float = 1.0
    curve: Curve | None = None  # where the way is not straight

    @cached_property
    def segment(self) -> Segment:
        """The way, if it is straight."""
        return Segment(self.view.weights, self.end, self.view.points.reader.trained)

    @property
    def outputs(self) -> Float[Tensor, "point out"]:
        """f(θ_s) at all points."""
        return self.view.outputs

    @property
    def right(self) -> list[Features]:
        """The features of the training examples at θ_s."""
        return self.view.right

    @cached_property
    def steered(self) -> list[Features]:
        """The features of the training examples, each weight's part times its factor of the step size."""
        return self.steer(self.right)

    def steer(self, features: Iterable[Features]) -> list[Features]:
        """Each weight's part times its factor of the step size."""
        if all(factor == 1 for factor in self.factors.values()):
            return list(features)
        return [block.scaled(self.factors) for block in features]

    @cached_property
    def side(self) -> AbstractRightSide:
        """What kernels of the step are between its points and; of a sketch, the direction of the step is exact."""
        sketch = self.view.points.sketch
        if sketch is None:
            return right_side(None, self.steered)
        return right_side(sketch, self.steered, unit(total(self.steered, self.output_gradient, self.view.weights)))

    @cached_property
    def pulled_side(self) -> AbstractRightSide:
        """What contributions are kernels with: each training example has one output, Σ_c ℓ′_c of its outputs."""
        pulled = self.steer(self.view.pulled(self.output_gradient))
        sketch = self.view.points.sketch
        return right_side(sketch, pulled, None if sketch is None else unit(summed(pulled, self.view.weights)))

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
        return torch.stack([node.step_size * node.output_gradient for node in self.nodes(IMPULSE_NODES)]).sum(0)

    def nodes(self, count: int) -> Iterator[Step]:
        """So many places on every arc of a curve: steps that lead nowhere, each as long as its node counts."""
        for node in self.curve.nodes(count) if self.curve is not None else ():
            yield replace(
                self,
                view=node.view,
                end=node.view.weights,
                output_gradient=node.output_gradient,
                step_size=self.step_size * node.length * node.weight,
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
