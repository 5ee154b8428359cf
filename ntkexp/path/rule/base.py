"""Quadrature rules for the mean Jacobian of one finite training step."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from ntkexp.component import Component
from ntkexp.mistake import Mistake

# --- The mean Jacobian of a step.
#
# In a step from θ₀ to θ₁ = θ₀ + Δθ, the outputs at x change by exactly J̄Δθ, where
# J̄ = ∫₀¹ J(θ₀ + uΔθ; x) du is the mean Jacobian. A rule replaces this integral by a weighted
# sum over substeps. A substep goes from u₀ to u₁. Its Jacobian is the secant Jacobian
# from θ₀ + u₀Δθ to θ₀ + u₁Δθ, or the tangent Jacobian J(θ₀ + u₀Δθ) if u₀ = u₁. The
# weights of the substeps sum to one.


class Substep(NamedTuple):
    """The part of a step from θ₀ + start·Δθ to θ₀ + end·Δθ,
    and the weight of its Jacobian."""

    start: float
    end: float
    weight: float


class AbstractRule(Component):
    """A quadrature rule for the mean Jacobian J̄ of a step."""

    # True if J̄Δθ equals the change of the outputs, up to rounding
    closes: ClassVar[bool] = False

    @abstractmethod
    def quadrature(
        self, points: int, substeps: int, romberg: int
    ) -> tuple[Substep, ...]:
        """Return the substeps of a step, for `points` Gauss points, or for `substeps`
        equal substeps with `romberg` extrapolations. Each rule ignores the arguments
        that it does not need."""

    @abstractmethod
    def detail(self, points: int, substeps: int, romberg: int) -> str:
        """Return the settings of this rule as text, for a table."""


class Left(AbstractRule):
    """The tangent Jacobian at the start of the step, as in Domingos (2020). Its error
    is of first order in the step size.

    J̄ = J(θ₀).

    >>> Left().quadrature(points=2, substeps=1, romberg=0)
    (Substep(start=0.0, end=0.0, weight=1.0),)
    """

    def quadrature(
        self, points: int, substeps: int, romberg: int
    ) -> tuple[Substep, ...]:
        return (Substep(0.0, 0.0, 1.0),)

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        return ""


class Gauss(AbstractRule):
    """Tangent Jacobians at n Gauss–Legendre points inside the step. The error is of
    order 2n in the step size for smooth networks, and of order about 1 for networks
    with kinks.

    J̄ = Σ_k w_k J(θ₀ + u_k Δθ). With one point, u is the midpoint.

    >>> Gauss().quadrature(points=1, substeps=1, romberg=0)
    (Substep(start=0.5, end=0.5, weight=1.0),)
    """

    def quadrature(
        self, points: int, substeps: int, romberg: int
    ) -> tuple[Substep, ...]:
        positions, weights = np.polynomial.legendre.leggauss(points)
        starts = ((1 + positions) / 2).tolist()
        return tuple(map(Substep, starts, starts, (weights / 2).tolist()))

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        return f"points={points}"


class Secant(AbstractRule):
    """Secant Jacobians of substeps. J̄Δθ is the exact change of the outputs for every
    step size, also across kinks.

    J̄ = S(substeps, romberg), as defined below.

    >>> Secant().quadrature(points=2, substeps=1, romberg=0)
    (Substep(start=0.0, end=1.0, weight=1.0),)
    >>> Secant().quadrature(points=2, substeps=2, romberg=1)[-1]
    Substep(start=0.0, end=1.0, weight=-0.3333333333333333)

    S_n is the average of the secant Jacobians of n equal substeps. The secant Jacobian
    of a substep, times its Δθ, equals the change of the outputs along the substep.
    These changes add up, so S_n Δθ = Δf for every n. S_n converges to the mean Jacobian
    with error O(n⁻²). Romberg's extrapolation keeps S Δθ = Δf, because its weights sum
    to one:

        S(n, 0) = S_n,    S(n, k) = S(n, k−1) + (S(n, k−1) − S(n/2, k−1)) / (4ᵏ − 1)
    """

    closes: ClassVar[bool] = True

    def quadrature(
        self, points: int, substeps: int, romberg: int
    ) -> tuple[Substep, ...]:
        if substeps % 2**romberg:
            raise Mistake(
                f"path.romberg={romberg} halves the substeps {romberg} times, but "
                f"path.substeps={substeps} is not a multiple of {2**romberg}"
            )
        quadrature = []
        for n, share in shares(substeps, romberg).items():
            quadrature += [Substep(k / n, (k + 1) / n, share / n) for k in range(n)]
        return tuple(quadrature)

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        if not romberg:
            return f"substeps={substeps}"
        return f"substeps={substeps} romberg={romberg}"


def shares(substeps: int, romberg: int) -> dict[int, float]:
    """Return the weight of each S_m in Romberg's extrapolation, by m = n, n/2, … with
    n = `substeps`. S_m is the average of the secant Jacobians of m equal substeps.

    >>> shares(2, 1)
    {2: 1.3333333333333333, 1: -0.3333333333333333}
    """
    if romberg == 0:
        return {substeps: 1.0}
    gain = 1 / (4**romberg - 1)
    total = {
        n: (1 + gain) * share for n, share in shares(substeps, romberg - 1).items()
    }
    for n, share in shares(substeps // 2, romberg - 1).items():
        total[n] = total.get(n, 0.0) - gain * share
    return total
