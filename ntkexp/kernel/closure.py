"""Closure: J̄Δθ = f(θ₁) − f(θ₀), which rounding alone may break.

Neither end of Δf is known better than f itself is, and f is a chain of sums, each rounded to eps of its terms. So

    ‖J̄Δθ − Δf‖ ≤ MULTIPLE · eps · (‖f(θ₀)‖ + ‖f(θ₁)‖)

with norms over all examples and outputs, and eps that of the shortest numbers between weights and outputs. What is
beyond that is no rounding, or that of a network whose outputs are small differences of large numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.precision import eps
from ntkexp.kernel.tape import Tape

MULTIPLE = 1000  # the tests' networks stay below 100; their terms are some ten times larger than their outputs


@dataclass(frozen=True)
class Closure:
    """How far a secant is from the change that it explains, and how far rounding may take it."""

    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains the error; an error that is no number is not explained.

        >>> Closure(1e-15, 1e-12).holds, Closure(float("nan"), 1e-12).holds
        (True, False)
        """
        return self.error <= self.bound


def closure(push: Float[Tensor, "example out"], start: Tape, end: Tape) -> Closure:
    """Of J̄Δθ as it was pushed, between the tapes of the ends."""
    before, after = start.outputs, end.outputs
    size = float(before.norm()) + float(after.norm())
    return Closure(float((push - (after - before)).norm()), bound(size, max(eps(start), eps(end))))


def bound(size: float, eps: float) -> float:
    """How far rounding may take sums of terms of this size.

    >>> bound(size=2.0, eps=1e-16)
    2e-13
    """
    return MULTIPLE * eps * size
