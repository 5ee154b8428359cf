"""A rule says how the kernel of one finite step is read."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from ntkexp.component import Component
from ntkexp.mistake import Mistake

# --- A rule says how the kernel of one finite step is read.
#
# On a step from θ₀ to θ₁ = θ₀ + Δθ the change of the network is exactly [∫₀¹ J(θ₀ + uΔθ; x) du]·Δθ.
# A rule replaces the integral by a weighted sum over substeps [u₀, u₁] of the step: the secant
# Jacobian of the substep, which is the tangent J(θ₀ + uΔθ) where the substep has length zero.
# Weights sum to one.


class Substep(NamedTuple):
    """Part of a step, from θ₀ + start·Δθ to θ₀ + end·Δθ, and the weight of its Jacobian."""

    start: float
    end: float
    weight: float


class AbstractRule(Component):
    """A quadrature of a step."""

    closes: ClassVar[bool] = False  # whether J̄Δθ is the change of the network, to rounding

    @abstractmethod
    def quadrature(self, points: int, substeps: int, romberg: int) -> tuple[Substep, ...]:
        """The substeps of a step; each rule uses the numbers that concern it."""

    @abstractmethod
    def detail(self, points: int, substeps: int, romberg: int) -> str:
        """The numbers that concern this rule, for a table."""


class Left(AbstractRule):
    """The left end of the step: the sum of Domingos (2020), of first order in the step size.

    J(θ₀).

    >>> Left().quadrature(points=2, substeps=1, romberg=0)
    (Substep(start=0.0, end=0.0, weight=1.0),)
    """

    def quadrature(self, points: int, substeps: int, romberg: int) -> tuple[Substep, ...]:
        return (Substep(0.0, 0.0, 1.0),)

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        return ""


class Gauss(AbstractRule):
    """Gauss–Legendre points inside the step: order 2n in the step size on smooth networks, about 1
    where there are kinks.

    Σ_k w_k J(θ₀ + u_k Δθ); one point is the midpoint.

    >>> Gauss().quadrature(points=1, substeps=1, romberg=0)
    (Substep(start=0.5, end=0.5, weight=1.0),)
    """

    def quadrature(self, points: int, substeps: int, romberg: int) -> tuple[Substep, ...]:
        positions, weights = np.polynomial.legendre.leggauss(points)
        starts = ((1 + positions) / 2).tolist()
        return tuple(map(Substep, starts, starts, (weights / 2).tolist()))

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        return f"points={points}"


class Secant(AbstractRule):
    """Secant Jacobians: exact at every step size, for kinks too.

    S(substeps, romberg).

    >>> Secant().quadrature(points=2, substeps=1, romberg=0)
    (Substep(start=0.0, end=1.0, weight=1.0),)
    >>> Secant().quadrature(points=2, substeps=2, romberg=1)[-1]
    Substep(start=0.0, end=1.0, weight=-0.3333333333333333)

    The step is cut into n equal substeps and their secant Jacobians J̄ are averaged. Each closes,
    J̄Δθ = Δf, and the differences telescope, so the average closes for every n; its parts tend to
    those of the integral like n⁻². Romberg's extrapolation keeps the closure, because its weights
    sum to one:

        S(n, 0) = S_n,    S(n, k) = S(n, k−1) + (S(n, k−1) − S(n/2, k−1)) / (4ᵏ − 1)
    """

    closes: ClassVar[bool] = True

    def quadrature(self, points: int, substeps: int, romberg: int) -> tuple[Substep, ...]:
        if substeps % 2**romberg:
            raise Mistake(
                f"path.romberg={romberg} halves the substeps {romberg} times, but path.substeps={substeps} is not a "
                "multiple of "
                f"{2**romberg}"
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
    """The weight of S_n, S_{n/2}, … in S(n, romberg).

    >>> shares(2, 1)
    {2: 1.3333333333333333, 1: -0.3333333333333333}
    """
    if romberg == 0:
        return {substeps: 1.0}
    gain = 1 / (4**romberg - 1)
    total = {n: (1 + gain) * share for n, share in shares(substeps, romberg - 1).items()}
    for n, share in shares(substeps // 2, romberg - 1).items():
        total[n] = total.get(n, 0.0) - gain * share
    return total
