"""An arc of a curve in weight space: a polynomial of degree 4 between two ends, at which it has the curve's slopes.

θ(u) = θ₀ + u(c₁ + (1−u)(c₂ + u(c₃ + (1−u)c₄)))        (Hairer, Nørsett & Wanner 1993, II.6)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ntkexp.shapes import Weights

VectorField: TypeAlias = Callable[[Weights], Weights]
"""A direction at every point of weight space."""


@dataclass(frozen=True)
class Arc:
    """An arc leads from `start`, over `length` of a training step."""

    start: Weights
    coefficients: tuple[Weights, Weights, Weights, Weights]
    length: float

    def at(self, position: float) -> Weights:
        """Find the weights θ(u).

        >>> one, zero = {"w": torch.tensor(1.0)}, {"w": torch.tensor(0.0)}
        >>> Arc(zero, (one, one, zero, zero), 1.0).at(0.5)
        {'w': tensor(0.7500)}
        """
        u, v = position, 1 - position
        first, second, third, fourth = self.coefficients
        return {
            name: torch.add(
                weight, first[name] + v * (second[name] + u * (third[name] + v * fourth[name])), alpha=position
            )
            for name, weight in self.start.items()
        }
