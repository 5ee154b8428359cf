"""What smooth layers do to one tile, by powers of the correlation ρ with coefficients b_k that were laid out.

    K′ = a₀a₀ + K Σ_k b_k b_k ρᵏ/(k + 1),    Θ′ = Θ Σ_k b_k b_k ρᵏ

Powers come from the last to the first, four at a time, so that a tile's sums are read and written seldom. They are
those of t, ρ or for functions that are odd or even ρ², and what is left is ρ itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.layer.smooth import TOGETHER
from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.wide import wide

Array = np.ndarray[Any, Any]

__all__ = ["TOGETHER", "continued", "continued_for_one", "correlated", "expanded"]


@compiled
def correlated(
    K: Array,
    value: Array,
    slope: Array,
    t: Array,
    margin: int,
    size: int,
    step: int,
    F1: Array,
    F2: Array,
    a_: int,
    b_: int,
) -> None:
    """Sums of nothing, and t."""
    wide()
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(a_), np.uintp(b_)
    for j in range(count):
        rho = K[j + start] * F1[a + j] * F2[b + j]
        t[j] = rho * rho if step == 2 else rho
        value[j] = 0
        slope[j] = 0


@compiled
def continued(
    value: Array,
    slope: Array,
    t: Array,
    size: int,
    shares: Array,
    F1: Array,
    F2: Array,
    a_: int,
    pitch: int,
    b_: int,
    pitch2: int,
) -> None:
    """Four more terms, of coefficients at both ends."""
    wide()
    a, b, w0, w1, w2, w3 = np.uintp(a_), np.uintp(b_), shares[0], shares[1], shares[2], shares[3]
    a1, a2, a3 = np.uintp(a_ + pitch), np.uintp(a_ + 2 * pitch), np.uintp(a_ + 3 * pitch)
    b1, b2, b3 = np.uintp(b_ + pitch2), np.uintp(b_ + 2 * pitch2), np.uintp(b_ + 3 * pitch2)
    for j in range(np.uintp(size)):
        x = t[j]
        p0, p1 = F1[a + j] * F2[b + j], F1[a1 + j] * F2[b1 + j]
        p2, p3 = F1[a2 + j] * F2[b2 + j], F1[a3 + j] * F2[b3 + j]
        slope[j] = p0 + x * (p1 + x * (p2 + x * (p3 + x * slope[j])))
        value[j] = w0 * p0 + x * (w1 * p1 + x * (w2 * p2 + x * (w3 * p3 + x * value[j])))


@compiled
def continued_for_one(
    value: Array, slope: Array, t: Array, size: int, shares: Array, numbers: Array, F2: Array, b_: int, pitch2: int
) -> None:
    """Four more terms, of which those of the left side are numbers."""
    wide()
    w0, w1, w2, w3 = shares[0], shares[1], shares[2], shares[3]
    n0, n1, n2, n3 = numbers[0], numbers[1], numbers[2], numbers[3]
    b, b1, b2, b3 = np.uintp(b_), np.uintp(b_ + pitch2), np.uintp(b_ + 2 * pitch2), np.uintp(b_ + 3 * pitch2)
    for j in range(np.uintp(size)):
        x = t[j]
        p0, p1, p2, p3 = n0 * F2[b + j], n1 * F2[b1 + j], n2 * F2[b2 + j], n3 * F2[b3 + j]
        slope[j] = p0 + x * (p1 + x * (p2 + x * (p3 + x * slope[j])))
        value[j] = w0 * p0 + x * (w1 * p1 + x * (w2 * p2 + x * (w3 * p3 + x * value[j])))


@compiled
def expanded(
    K: Array,
    theta: Array,
    value: Array,
    slope: Array,
    margin: int,
    size: int,
    first: int,
    F1: Array,
    F2: Array,
    a_: int,
    b_: int,
    pitch: int,
    pitch2: int,
) -> None:
    """K and Θ from the sums, those of an even function times ρ."""
    wide()
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(a_), np.uintp(b_)
    a0, b0 = np.uintp(a_ + pitch), np.uintp(b_ + pitch2)
    for j in range(count):
        i = j + start
        rho = K[i] * F1[a + j] * F2[b + j] if first else K.dtype.type(1)
        K[i] = F1[a0 + j] * F2[b0 + j] + K[i] * rho * value[j]
        theta[i] *= rho * slope[j]
