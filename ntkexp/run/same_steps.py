"""The steps that training took, taken once more in function space with a fixed kernel Θ.

An optimizer that scales all weights alike keeps a linear model at θ_s = ρ_s θ_0 + J(X)ᵀ a_s, where ρ and a move as
weights do whose gradients are 0 and ℓ′:

    f_s(X) = f_0(X) + Θ(X, X) a_s + (ρ_s − 1) J(X)·θ_0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.evidence import DoesNotApply
from ntkexp.machine.training import Repeated
from ntkexp.optimizer.base import AbstractOptimizer, Memory
from ntkexp.path.descent import Descent
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class SameSteps:
    """A descent, with the size of each of its steps and the factor by which its gradient was shortened."""

    descent: Descent
    step_sizes: Sequence[float]
    clippings: Sequence[float]

    def __call__(
        self, kernel: Float[Tensor, "row column"], start: Float[Tensor, "train out"], pull: Float[Tensor, "train out"]
    ) -> Repeated:
        """Where they lead with this kernel."""
        optimizer = self.descent.optimizer
        refuse_unlike_steps(optimizer)
        coordinates: Weights = {"examples": torch.zeros_like(start), "start": start.new_ones(())}
        memory: Memory = {}

        def gradient(step: int, here: Weights) -> Weights:
            learned = (kernel @ here["examples"].flatten()).view_as(start)
            outputs = start + learned + (here["start"] - 1) * pull
            return {"examples": self.output_gradient(step, outputs), "start": start.new_zeros(())}

        for step, step_size in enumerate(self.step_sizes):
            sizes, field = dict.fromkeys(coordinates, step_size), partial(gradient, step)
            move = optimizer.move(step, coordinates, field(coordinates), field, sizes, memory)
            coordinates, memory = move.weights, move.memory
        return Repeated(coordinates["examples"], coordinates["start"])

    def output_gradient(self, step: int, outputs: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        """ℓ′ at other outputs than those of the network, shortened as its gradient was."""
        return self.descent.output_gradient(step, outputs) * self.clippings[step]


def refuse_unlike_steps(optimizer: AbstractOptimizer) -> None:
    """A kernel knows of steps that scale all weights alike."""
    if optimizer.elementwise:
        raise DoesNotApply(
            f"optimizer={optimizer.option} scales every weight by itself, which no frozen kernel knows of"
        )
    if optimizer.layers:
        raise DoesNotApply("the step size differs between layers, which no frozen kernel knows of")
