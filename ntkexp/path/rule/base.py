"""A rule says how the kernel of one finite step is read.

On a step from θ₀ to θ₁ = θ₀ + Δθ the change of the network is exactly [∫₀¹ J(θ₀ + uΔθ; x) du]·Δθ. A rule replaces
the integral by a weighted sum over pieces [u₀, u₁] of the step: the secant Jacobian of the piece, which is the
tangent J(θ₀ + uΔθ) where the piece has length zero. Weights sum to one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from ntkexp.component import Component


class Piece(NamedTuple):
    """Part of a step, from θ₀ + start·Δθ to θ₀ + end·Δθ, and the weight of its Jacobian."""

    start: float
    end: float
    weight: float


class AbstractRule(Component):
    """A quadrature of a step."""

    closes: ClassVar[bool] = False  # whether J̄Δθ is the change of the network, to rounding

    @abstractmethod
    def quadrature(self, nodes: int, pieces: int, romberg: int) -> tuple[Piece, ...]:
        """The pieces of a step; each rule uses the numbers that concern it."""

    @abstractmethod
    def detail(self, nodes: int, pieces: int, romberg: int) -> str:
        """The numbers that concern this rule, for a table."""
