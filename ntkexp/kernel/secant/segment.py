"""A step from θ₀ to θ₁ as a segment in weight space, and the check that its secant
Jacobian J̄ closes: J̄Δθ = f(θ₁) − f(θ₀) up to rounding."""

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

# The secant Jacobian J̄ of a segment satisfies J̄(θ₁ − θ₀) = f(θ₁) − f(θ₀) exactly. On
# a segment of length zero, called a point, J̄ is the Jacobian J(θ₀).


@dataclass(frozen=True)
class Segment:
    """The weights θ₀ (`start`) and θ₁ (`end`).
    Kernels sum over the weights named in `trained`."""

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
        """Return θ₀ + u(θ₁ − θ₀), for the position u.

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


# Closure. f is a chain of sums. Each sum is rounded to eps of its terms, so f(θ₀) and
# f(θ₁) have rounding errors. The test is
#
#     ‖J̄Δθ − Δf‖ ≤ MULTIPLE · eps · (‖f(θ₀)‖ + ‖f(θ₁)‖)
#
# The norms run over all examples and outputs. eps is the largest machine epsilon of all
# values between weights and outputs. If the test fails, the user gets a remark,
# because rounding explains such an error only if the outputs are small differences of
# large numbers. If the error is nan, or so large that f has lost half of its digits,
# the kernel counts as wrong.


ALL = slice(None)
# errors in the tests are below 100 · eps · (‖f(θ₀)‖ + ‖f(θ₁)‖), and terms inside
# networks may be about ten times larger than outputs
MULTIPLE = 1000


@dataclass(frozen=True)
class Closure:
    """The error ‖J̄Δθ − Δf‖, and the largest error that rounding can cause."""

    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """True if the error is within its bound. False if the error is nan.

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
        if 0 < self.bound < inf:
            return self.miss / self.bound
        return 0.0 if self.holds else inf

    @property
    def words(self) -> str:
        """The error and its bound, as text for messages.

        >>> Closure(1e-2, 1e-9).words
        'by 0.01 where rounding explains 1e-09'
        """
        return f"by {self.error:.2g} where rounding explains {self.bound:.2g}"


def closure(
    jvp: Float[Tensor, "example out"],
    start: Tape,
    end: Tape,
    chosen: Sequence[int] | slice = ALL,
) -> Closure:
    """Compare J̄Δθ (`jvp`) with f(θ₁) − f(θ₀), read from both tapes,
    for the chosen outputs."""
    before = start.outputs[:, chosen]
    after = end.outputs[:, chosen]
    size = float(start.outputs.norm()) + float(end.outputs.norm())
    return Closure(
        float((jvp - (after - before)).norm()), bound(size, max(start.eps, end.eps))
    )


def closure_remark(closures: Sequence[Closure], eps: float) -> str | None:
    """Return a remark on the largest of some errors ‖J̄Δθ − Δf‖, or None if it is only
    rounding. Raise Mistake if the kernel would be wrong.

    >>> closure_remark([Closure(1e-13, 1e-12), Closure(1e-11, 1e-12)], 1e-16)
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
    """Return a bound on the rounding error of sums whose terms have this size.

    >>> bound(size=2.0, eps=1e-16)
    2e-13
    """
    return MULTIPLE * eps * size
