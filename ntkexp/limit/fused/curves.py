"""What smooth layers and norms do to one tile, at every pixel from what was laid out for its two ends, a₁ and a₂.

    erf     a = 1/√(1 + 2q), s = 2K a₁a₂:     K′ = (2/π) arcsin s,  Θ′ = Θ (4/π) a₁a₂/√(1 − s²)
    GELU    a = 1/√(1 + q),  s = K a₁a₂:      with g = √(1 − s²), A = a₁²a₂² and φ = ¼ + arcsin(s)/2π
            K′ = √A/2π · (s²/g + q₁q₂g) + Kφ,  Θ′ = Θ (s/(2πg) · (A/g² + (1 − q₁q₂)A + 1) + φ)
    sine    a = b²q/2:                         e± = exp(∓b²K − a₁ − a₂), e₊ times cos 2c₀
            K′ = (a²/2)(e₋ − e₊),  Θ′ = Θ (a²b²/2)(e₋ + e₊)
    norm    a = 1/√(q + ε):                    K′ = K a₁a₂,  Θ′ = Θ a₁a₂

Where a pixel meets itself 1 − s = a₁a₂, of erf and of GELU, and b²K = a₁ + a₂. Elsewhere 1 − s is more than half of
that, whatever rounding says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.covariance.operation import ARC, GATE, NORM, SERIES
from ntkexp.limit.fused.arc_sine import arc_sine
from ntkexp.limit.fused.exponential import exponential
from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.series import TOGETHER, continued, continued_for_one, correlated, expanded
from ntkexp.limit.fused.wide import wide

Array = np.ndarray[Any, Any]


@compiled
def curved(
    kind: int,
    weights: Array,
    terms: int,
    numbers: Array,
    sums: Array,
    lows: Array,
    more: Array,
    K: Array,
    theta: Array,
    margin: int,
    size: int,
    itself: bool,
    F1: Array,
    F2: Array,
    a: int,
    b: int,
    pitch: int,
    pitch2: int,
) -> None:
    """K and Θ after the operation of this kind, of which fields begin at a and b."""
    if kind == NORM:
        normed(K, theta, margin, size, F1, F2, a, b)
    elif kind == ARC:
        arced(K, theta, margin, size, itself, F1, F2, a, b)
    elif kind == GATE:
        gated(K, theta, margin, size, itself, F1, F2, a, b, a + pitch, b + pitch2)
    elif kind == SERIES:
        first, step = int(weights[5]), int(weights[6])
        sums, lows, more = sums[margin:], lows[margin:], more[margin:]  # margins stay zero, for windows
        correlated(K, sums, lows, more, margin, size, step, F1, F2, a, b)
        for k in range(terms - TOGETHER, -1, -TOGETHER):
            shares = weights.dtype.type(1) / (first + 1 + step * np.arange(k, k + TOGETHER)).astype(weights.dtype)
            there = b + (2 + k) * pitch2
            if numbers.shape[0]:
                continued_for_one(sums, lows, more, size, shares, numbers[2 + k :], F2, there, pitch2)
            else:
                continued(sums, lows, more, size, shares, F1, F2, a + (2 + k) * pitch, pitch, there, pitch2)
        expanded(K, theta, sums, lows, margin, size, first, F1, F2, a, b, pitch, pitch2)
    else:
        waved(K, theta, margin, size, itself, weights[5:], F1, F2, a, b)


@compiled
def arced(
    K: Array, theta: Array, margin: int, size: int, itself: bool, F1: Array, F2: Array, one_: int, two_: int
) -> None:
    """K and Θ after erf."""
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(one_), np.uintp(two_)
    number = K.dtype.type
    half, one, turn, share, slope = number(0.5), number(1), number(np.pi / 2), number(2 / np.pi), number(4 / np.pi)
    for j in range(count):
        i = j + start
        length = F1[a + j] * F2[b + j]
        s = K[i] * (length + length)
        rest = length if itself else max(one - abs(s), half * length)
        rest = rest if length > 0 else one
        theta[i] *= slope * length / np.sqrt(rest * (one + abs(s)))
        K[i] = share * arc_sine(s, rest, half, turn)


@compiled
def gated(
    K: Array,
    theta: Array,
    margin: int,
    size: int,
    itself: bool,
    F1: Array,
    F2: Array,
    one_: int,
    two_: int,
    q1: int,
    q2: int,
) -> None:
    """K and Θ after GELU."""
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(one_), np.uintp(two_)
    qa, qb, number = np.uintp(q1), np.uintp(q2), K.dtype.type
    half, one, turn = number(0.5), number(1), number(np.pi / 2)
    quarter, circle = number(0.25), number(0.5 / np.pi)
    for j in range(count):
        i = j + start
        length, squared, c = F1[a + j] * F2[b + j], F1[qa + j] * F2[qb + j], K[i]
        s = c * length
        rest = length if itself else max(one - abs(s), half * length)
        rest = rest if length > 0 else one
        square = rest * (one + abs(s))
        g, A = np.sqrt(square), length * length
        phi = quarter + circle * arc_sine(s, rest, half, turn)
        K[i] = circle * length * (s * s / g + squared * g) + c * phi
        theta[i] *= circle * s / g * (A / square + (one - squared) * A + one) + phi


@compiled
def waved(
    K: Array,
    theta: Array,
    margin: int,
    size: int,
    itself: bool,
    constants: Array,
    F1: Array,
    F2: Array,
    a_: int,
    b_: int,
) -> None:
    """K and Θ after a sine: a²/2, b² and cos 2c₀ are the constants."""
    wide()
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(a_), np.uintp(b_)
    scale, squared, phase = constants[0], constants[1], constants[2]
    for j in range(count):
        i = j + start
        both = F1[a + j] + F2[b + j]
        moved = both if itself else squared * K[i]
        near, far = exponential(moved - both), phase * exponential(-moved - both)
        K[i] = scale * (near - far)
        theta[i] *= scale * squared * (near + far)


@compiled
def normed(K: Array, theta: Array, margin: int, size: int, F1: Array, F2: Array, one_: int, two_: int) -> None:
    """K and Θ after a norm."""
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(one_), np.uintp(two_)
    for j in range(count):
        i = j + start
        share = F1[a + j] * F2[b + j]
        K[i] *= share
        theta[i] *= share
