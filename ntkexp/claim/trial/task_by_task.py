"""A network learns one task after another, by gradient descent on all examples of the task.

    f = α (g(θ) − g(θ₀)),    θ ← θ − η/(α M) Σᵢ ∇g(θ; xᵢ) ℓ′ᵢ,    ℓ′ᵢ = f(xᵢ) − yᵢ,    η = fraction · 2M/λ_max

with λ_max the largest eigenvalue of the tangent kernel of g among the task's examples, measured again every few steps:
a network that is not lazy would otherwise leave the range in which steps are stable. Whatever α is, the step moves f by
−η/M Σᵢ K̄(x, xᵢ) ℓ′ᵢ, with K̄ the secant kernel of g.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.data.base import Split
from ntkexp.library import tangent_kernel
from ntkexp.model.functional import function_of, weights_of
from ntkexp.shapes import Weights

REFRESH = 20
"""The largest eigenvalue is measured again after so many steps."""


@dataclass(frozen=True)
class LearnedTask:
    """What is learned before something else is, or after."""

    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, " train"]


def task_of(split: Split) -> LearnedTask:
    """Two classes are −1 and 1."""
    return LearnedTask(split.inputs, split.target.double() * 2 - 1)


@dataclass(frozen=True)
class LearningStep:
    """A step from `before` to `after`, its size, and what was missed before it."""

    before: Weights
    after: Weights
    size: float
    missed: Float[Tensor, " train"]

    @property
    def loss(self) -> float:
        """The mean of ½ missed² before the step."""
        return float(self.missed.square().mean() / 2)


class ScaledNetwork:
    """A module of one output, scaled by α and without its first output."""

    def __init__(self, module: nn.Module, alpha: float) -> None:
        self.module, self.alpha, self.function = module, alpha, function_of(module)
        self.start = weights_of(module)

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, " point"]:
        """Outputs, which are zero before anything is learned."""
        return self.alpha * (self.function(weights, x) - self.function(self.start, x))[:, 0]

    def kernel(self, weights: Weights, x1: Tensor, x2: Tensor) -> Float[Tensor, "point train"]:
        """The tangent kernel of the module, which is that of the outputs over α²."""
        return tangent_kernel(self.module, x1, x2, weights=weights)[:, 0, :, 0]

    def learn(
        self,
        weights: Weights,
        task: LearnedTask,
        steps: int,
        fraction: float,
        until: float,
        stride: float = math.inf,
    ) -> Iterator[LearningStep]:
        """Take steps on a task, so many, or until the mean of ½ missed² is no larger than `until`.

        None moves the weights by more than `stride`, as a share of their length.
        """
        count, size = len(task.targets), 0.0
        for number in range(steps):
            if number % REFRESH == 0:
                largest = float(torch.linalg.eigvalsh(self.kernel(weights, task.inputs, task.inputs))[-1])
                size = fraction * 2 * count / largest
            leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            missed = self.outputs(leaves, task.inputs) - task.targets
            gradients = torch.autograd.grad(missed.square().sum() / (2 * count), list(leaves.values()))
            longest = stride * length(leaves.values()) / length(gradients) * self.alpha**2
            taken = min(size, float(longest)) if math.isfinite(stride) else size
            after = {
                name: weight.detach() - taken / self.alpha**2 * gradient
                for (name, weight), gradient in zip(leaves.items(), gradients, strict=True)
            }
            step = LearningStep(weights, after, taken, missed.detach())
            if step.loss <= until:
                return
            yield step
            weights = after

    def learned(self, weights: Weights, task: LearnedTask, steps: int, fraction: float, until: float) -> Weights:
        """The weights after such steps."""
        for step in self.learn(weights, task, steps, fraction, until):
            weights = step.after
        return weights


def length(parts: Iterable[Tensor]) -> Float[Tensor, ""]:
    """The length of a vector in parts.

    >>> length([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    found: Tensor = torch.stack([part.detach().norm() for part in parts]).norm()
    return found
