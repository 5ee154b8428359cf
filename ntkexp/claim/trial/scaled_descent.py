"""A function of weights learns, scaled and without its first outputs, by stable steps of descent on all examples.

    f = α (g(θ) − g(θ₀)),    θ ← θ − η/(α M) Σᵢ ∇g(θ; xᵢ) ℓ′ᵢ,    ℓ′ᵢ = f(xᵢ) − yᵢ,    η = fraction · 2M/λ_max

with λ_max the largest eigenvalue of the tangent kernel of g among the examples, asked for again every few steps: what
is not lazy would otherwise leave the range in which steps are stable. Whatever α is, the step moves f by
−η/M Σᵢ K̄(x, xᵢ) ℓ′ᵢ, with K̄ the secant kernel of g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.shapes import Function, Weights

REFRESH = 20
"""The largest eigenvalue is asked for again after so many steps."""


@dataclass(frozen=True)
class ScaledFunction:
    """A function of weights is scaled by α, and its outputs at the start are taken off."""

    function: Function
    start: Weights
    alpha: float

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, "point out"]:
        """Outputs, which are zero at the start."""
        return self.alpha * (self.function(weights, x) - self.function(self.start, x))


@dataclass(frozen=True)
class LearningStep:
    """A step from `before` to `after`, its size, and what was said and missed before it."""

    before: Weights
    after: Weights
    size: float
    outputs: Float[Tensor, "train out"]
    missed: Float[Tensor, "train out"]

    @property
    def loss(self) -> float:
        """The mean of ½ ‖missed‖² before the step."""
        return float(self.missed.square().sum() / (2 * len(self.missed)))


@dataclass(frozen=True)
class ScaledDescent:
    """Steps on the mean of ½ ‖missed‖²; none moves the weights by more than `stride`, as a share of their length."""

    scaled: ScaledFunction
    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, "train out"]
    largest: Callable[[Weights], float]  # the weights ↦ λ_max
    fraction: float
    stride: float = math.inf

    def path(self, weights: Weights, steps: int) -> Iterator[LearningStep]:
        """Take so many steps, each when it is asked for."""
        count, stable, alpha = len(self.targets), 0.0, self.scaled.alpha
        first = self.scaled.function(self.scaled.start, self.inputs).detach()
        for number in range(steps):
            if number % REFRESH == 0:
                stable = self.fraction * 2 * count / self.largest(weights)
            leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            outputs = alpha * (self.scaled.function(leaves, self.inputs) - first)
            missed = outputs - self.targets
            gradients = torch.autograd.grad(missed.square().sum() / (2 * count), list(leaves.values()))
            size = min(stable, self.stride * float(length(weights.values()) / length(gradients)) * alpha**2)
            pairs = zip(weights.items(), gradients, strict=True)
            after = {name: weight.detach() - size / alpha**2 * gradient for (name, weight), gradient in pairs}
            yield LearningStep(weights, after, size, outputs.detach(), missed.detach())
            weights = after


def length(parts: Iterable[Tensor]) -> Float[Tensor, ""]:
    """The length of a vector in parts.

    >>> length([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    found: Tensor = torch.stack([part.detach().norm() for part in parts]).norm()
    return found
