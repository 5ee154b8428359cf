"""A segment of weight space, from θ₀ to θ₁, and its closure J̄Δθ = f(θ₁) − f(θ₀), which holds up to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, isnan

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.tape import Tape
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights

# A network is read along a segment by its secant Jacobian J̄, with J̄(θ₁ − θ₀) = f(θ₁) − f(θ₀)
# exactly. On a segment of length zero, a point, J̄ is the tangent J(θ₀).


@dataclass(frozen=True)
class Segment:
    """The two ends. Kernels sum over the weights named in `trained`."""

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
        """Return θ₀ + u(θ₁ − θ₀).

        >>> step = Segment({"w": torch.tensor(1.0)}, {"w": torch.tensor(3.0)}, frozenset({"w"}))
        >>> step.at(0.5)
        {'w': tensor(2.)}
        """
        if position in (0.0, 1.0):
            if position:
                return self.end
            return self.start
        return {
            name: torch.lerp(weight, self.end[name], position)
            for name, weight in self.start.items()
        }


def point(weights: Weights) -> Segment:
    """Return the segment of length zero at these weights, all of them trained."""
    return Segment(weights, weights, frozenset(weights))


# Closure. Neither end of Δf is known better than f itself, and f is a chain of sums, each rounded
# to eps of its terms. So
#
#     ‖J̄Δθ − Δf‖ ≤ MULTIPLE · eps · (‖f(θ₀)‖ + ‖f(θ₁)‖)
#
# with norms over all examples and outputs, and the eps of the shortest numbers between weights and
# outputs. A larger error is not rounding, or the outputs are small differences of large numbers. If
# half of the digits of f are lost, or nan remains, the kernel is wrong.


ALL = slice(None)
# the tests' networks stay below 100; their terms are some ten times larger than their outputs
MULTIPLE = 1000


@dataclass(frozen=True)
class Closure:
    """The distance between J̄Δθ and the change of the outputs, and the bound that rounding
    explains.
    """

    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains the error. An error that is nan is not explained.

        >>> Closure(1e-15, 1e-12).holds, Closure(float("nan"), 1e-12).holds
        (True, False)
        """
        return isfinite(self.error) and self.error <= self.bound

    @property
    def miss(self) -> float:
        """The error, or infinity if it is nan."""
        if isnan(self.error):
            return inf
        return self.error

    @property
    def severity(self) -> float:
        """The error in units of its bound, or infinity if it is nan.

        >>> Closure(2e-12, 1e-12).severity, Closure(float("nan"), 1e-12).severity, Closure(0.0, 0.0).severity
        (2.0, inf, 0.0)
        """
        if self.holds:
            if self.bound:
                return self.error / self.bound
            return 0.0
        if 0 < self.bound < inf:
            return self.miss / self.bound
        return inf

    @property
    def words(self) -> str:
        """The error and its bound in words.

        >>> Closure(1e-2, 1e-9).words
        'by 0.01 where rounding explains 1e-09'
        """
        return f"by {self.error:.2g} where rounding explains {self.bound:.2g}"


def closure(
    push: Float[Tensor, "example out"], start: Tape, end: Tape, chosen: Sequence[int] | slice = ALL
) -> Closure:
    """Return the closure of J̄Δθ at the chosen outputs, from the tapes of both ends."""
    before = start.outputs[:, chosen]
    after = end.outputs[:, chosen]
    size = float(start.outputs.norm()) + float(end.outputs.norm())
    return Closure(float((push - (after - before)).norm()), bound(size, max(start.eps, end.eps)))


def explained(closures: Sequence[Closure], eps: float) -> str | None:
    """Return a remark on the worst closure of a segment if rounding does not explain it. Raise if
    the kernel would be wrong.

    >>> explained([Closure(1e-13, 1e-12), Closure(1e-11, 1e-12)], 1e-16)
    'the secant misses the change of the outputs by 1e-11 where rounding explains 1e-12'
    """
    worst = max(closures, key=lambda closure: closure.severity)
    remark = f"the secant misses the change of the outputs {worst.words}"
    if worst.severity * MULTIPLE * eps**0.5 > 1:
        raise Mistake(
            f"{remark}, so its kernel would be wrong; are the outputs finite at both ends?"
        )
    if worst.holds:
        return None
    return remark


def bound(size: float, eps: float) -> float:
    """Return how far rounding may move sums of terms of this size.

    >>> bound(size=2.0, eps=1e-16)
    2e-13
    """
    return MULTIPLE * eps * size
