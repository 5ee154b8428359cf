"""How the weights move, and on which examples each step is taken."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Int
from pydantic import Field, PositiveFloat
from torch import Tensor

from ntkexp.component import Component
from ntkexp.shapes import Weights


class AbstractOptimizer(Component):
    """A step size, given or as a fraction of the largest stable one at the start; `step_size` wins."""

    step_size: PositiveFloat | None = None
    stable_fraction: float = Field(0.5, gt=0)

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
