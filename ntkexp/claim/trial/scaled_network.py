"""A network of one output learns a task, scaled by α, by descent on all examples of the task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.claim.trial.scaled_descent import LearningStep, ScaledDescent, ScaledFunction
from ntkexp.data.base import Split
from ntkexp.library import tangent_kernel
from ntkexp.model.functional import function_of, weights_of
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class LearnedTask:
    """Inputs, and what is learned of them."""

    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, " train"]


def task_of(split: Split) -> LearnedTask:
    """Two classes are −1 and 1."""
    return LearnedTask(split.inputs, split.target.double() * 2 - 1)


class ScaledNetwork:
    """A module of one output, scaled by α and without its first output."""

    def __init__(self, module: nn.Module, alpha: float) -> None:
        self.module, self.start = module, weights_of(module)
        self.scaled = ScaledFunction(function_of(module), self.start, alpha)

    def outputs(self, weights: Weights, x: Tensor) -> Float[Tensor, " point"]:
        """Outputs, which are zero before anything is learned."""
        return self.scaled.outputs(weights, x)[:, 0]

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

        def largest(weights: Weights) -> float:
            return float(torch.linalg.eigvalsh(self.kernel(weights, task.inputs, task.inputs))[-1])

        descent = ScaledDescent(self.scaled, task.inputs, task.targets[:, None], largest, fraction, stride)
        for step in descent.path(weights, steps):
            if step.loss <= until:
                return
            yield step

    def learned(self, weights: Weights, task: LearnedTask, steps: int, fraction: float, until: float) -> Weights:
        """The weights after such steps."""
        for step in self.learn(weights, task, steps, fraction, until):
            weights = step.after
        return weights
