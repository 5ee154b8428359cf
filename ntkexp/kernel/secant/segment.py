"""A segment of weight space, from θ₀ to θ₁; a point is a segment of length zero.

A network is read along a segment by its secant Jacobian J̄, for which J̄(θ₁ − θ₀) = f(θ₁) − f(θ₀) exactly. On a segment
of length zero J̄ is the tangent J(θ₀).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ntkexp.shapes import Weights


@dataclass(frozen=True)
class Segment:
    """Two ends; kernels sum over the weights named in `trained`."""

    start: Weights
    end: Weights
    trained: frozenset[str]

    @property
    def is_point(self) -> bool:
        return self.start is self.end

    @cached_property
    def difference(self) -> Weights:
        """θ₁ − θ₀."""
        return {name: self.end[name] - weight for name, weight in self.start.items()}

    def at(self, position: float) -> Weights:
        """θ₀ + u(θ₁ − θ₀).

        >>> step = Segment({"w": torch.tensor(1.0)}, {"w": torch.tensor(3.0)}, frozenset({"w"}))
        >>> step.at(0.5)
        {'w': tensor(2.)}
        """
        if position in (0.0, 1.0):
            return self.end if position else self.start
        return {name: torch.lerp(weight, self.end[name], position) for name, weight in self.start.items()}


def point(weights: Weights) -> Segment:
    """The segment of length zero at these weights, all of them trained."""
    return Segment(weights, weights, frozenset(weights))
