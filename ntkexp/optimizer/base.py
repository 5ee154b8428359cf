"""How the weights move, and on which examples each step is taken."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Int
from pydantic import PositiveFloat, model_validator
from torch import Tensor

from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights


class AbstractOptimizer(Component):
    """A step size, given outright or as a fraction of the largest stable one at the start; half of it by default."""

    step_size: PositiveFloat | None = None
    stable_fraction: PositiveFloat | None = None

    @model_validator(mode="after")
    def refuse_both(self) -> AbstractOptimizer:
        """Two sizes of one step."""
        if self.step_size is not None and self.stable_fraction is not None:
            raise Mistake(
                f"optimizer.step_size={self.step_size:g} optimizer.stable_fraction={self.stable_fraction:g}: both set "
                "the step size; give one of them"
            )
        return self

    def chosen_step(self, largest_stable: float) -> float:
        """The step size before its schedule."""
        return self.step_size or (self.stable_fraction or 0.5) * largest_stable

    @abstractmethod
    def batch_indices(self, step: int, examples: int, seed: int) -> Int[Tensor, " batch"] | None:
        """The training examples of this step; `None` for all of them."""

    @abstractmethod
    def update(self, weights: Weights, gradient: Weights, step_size: float) -> Weights:
        """The weights after one step."""


def descend(weights: Weights, gradient: Weights, step_size: float) -> Weights:
    """θ − η g.

    >>> descend({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, 0.25)
    {'w': tensor([0.5000])}
    """
    return {name: torch.sub(weight, gradient[name], alpha=step_size) for name, weight in weights.items()}
