"""What the layers do to one tile: K and Θ at all pixels p for one offset, as flat arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.covariance.pairs import ADD, ARC, BEND, CLEAR, COPY, GATE, NORM, SERIES, WEIGH, WRAP
from ntkexp.layer.smooth import TOGETHER
from ntkexp.limit.fused.functions import (
    add_tile,
    angle,
    arc_sine,
    cleared,
    compiled,
    copy_tile,
    exponential,
    gap,
    lent,
    sum_window,
    wide,
    wrapped,
)

# --- What smooth layers do to one tile, by powers of the correlation ρ with coefficients b_k that were laid out.
#
#     K′ = a₀a₀ + K Σ_k b_k b_k ρᵏ/(k + 1),    Θ′ = Θ Σ_k b_k b_k ρᵏ
#
# Powers come from the last to the first, four at a time, so that a tile's sums are read and written seldom. They
# are those of t, ρ or for functions that are odd or even ρ², and what is left is ρ itself.


Array = np.ndarray[Any, Any]

__all__ = ["TOGETHER", "apply_series", "continued", "continued_for_one", "correlated"]


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
    value: Array,
    slope: Array,
    t: Array,
    size: int,
    shares: Array,
    numbers: Array,
    F2: Array,
    b_: int,
    pitch2: int,
) -> None:
    """Four more terms, of which those of the left side are numbers."""
    wide()
    w0, w1, w2, w3 = shares[0], shares[1], shares[2], shares[3]
    n0, n1, n2, n3 = numbers[0], numbers[1], numbers[2], numbers[3]
    b, b1, b2, b3 = (
        np.uintp(b_),
        np.uintp(b_ + pitch2),
        np.uintp(b_ + 2 * pitch2),
        np.uintp(b_ + 3 * pitch2),
    )
    for j in range(np.uintp(size)):
        x = t[j]
        p0, p1, p2, p3 = n0 * F2[b + j], n1 * F2[b1 + j], n2 * F2[b2 + j], n3 * F2[b3 + j]
        slope[j] = p0 + x * (p1 + x * (p2 + x * (p3 + x * slope[j])))
        value[j] = w0 * p0 + x * (w1 * p1 + x * (w2 * p2 + x * (w3 * p3 + x * value[j])))


@compiled
def apply_series(
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


# --- What smooth layers and norms do to one tile, at every pixel from what was laid out for its two ends, a₁ and a₂.
#
#     erf     a = 1/√(1 + 2q), s = 2K a₁a₂:     K′ = (2/π) arcsin s,  Θ′ = Θ (4/π) a₁a₂/√(1 − s²)
#     GELU    a = 1/√(1 + q),  s = K a₁a₂:      with g = √(1 − s²), A = a₁²a₂² and φ = ¼ + arcsin(s)/2π
#             K′ = √A/2π · (s²/g + q₁q₂g) + Kφ,  Θ′ = Θ (s/(2πg) · (A/g² + (1 − q₁q₂)A + 1) + φ)
#     sine    a = b²q/2:                         e± = exp(∓b²K − a₁ − a₂), e₊ times cos 2c₀
#             K′ = (a²/2)(e₋ − e₊),  Θ′ = Θ (a²b²/2)(e₋ + e₊)
#     norm    a = 1/√(q + ε):                    K′ = K a₁a₂,  Θ′ = Θ a₁a₂
#
# Where a pixel meets itself 1 − s = a₁a₂, of erf and of GELU, and b²K = a₁ + a₂. Elsewhere 1 − s is more than
# half of that, whatever rounding says.


@compiled
def apply_activation(
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
        apply_norm(K, theta, margin, size, F1, F2, a, b)
    elif kind == ARC:
        apply_erf(K, theta, margin, size, itself, F1, F2, a, b)
    elif kind == GATE:
        apply_gelu(K, theta, margin, size, itself, F1, F2, a, b, a + pitch, b + pitch2)
    elif kind == SERIES:
        first, step = int(weights[5]), int(weights[6])
        sums, lows, more = (
            sums[margin:],
            lows[margin:],
            more[margin:],
        )  # margins stay zero, for windows
        correlated(K, sums, lows, more, margin, size, step, F1, F2, a, b)
        for k in range(terms - TOGETHER, -1, -TOGETHER):
            shares = weights.dtype.type(1) / (first + 1 + step * np.arange(k, k + TOGETHER)).astype(
                weights.dtype
            )
            there = b + (2 + k) * pitch2
            if numbers.shape[0]:
                continued_for_one(
                    sums, lows, more, size, shares, numbers[2 + k :], F2, there, pitch2
                )
            else:
                continued(
                    sums,
                    lows,
                    more,
                    size,
                    shares,
                    F1,
                    F2,
                    a + (2 + k) * pitch,
                    pitch,
                    there,
                    pitch2,
                )
        apply_series(K, theta, sums, lows, margin, size, first, F1, F2, a, b, pitch, pitch2)
    else:
        apply_wave(K, theta, margin, size, itself, weights[5:], F1, F2, a, b)


@compiled
def apply_erf(
    K: Array,
    theta: Array,
    margin: int,
    size: int,
    itself: bool,
    F1: Array,
    F2: Array,
    one_: int,
    two_: int,
) -> None:
    """K and Θ after erf."""
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(one_), np.uintp(two_)
    number = K.dtype.type
    half, one, turn, share, slope = (
        number(0.5),
        number(1),
        number(np.pi / 2),
        number(2 / np.pi),
        number(4 / np.pi),
    )
    for j in range(count):
        i = j + start
        length = F1[a + j] * F2[b + j]
        s = K[i] * (length + length)
        rest = length if itself else max(one - abs(s), half * length)
        rest = rest if length > 0 else one
        theta[i] *= slope * length / np.sqrt(rest * (one + abs(s)))
        K[i] = share * arc_sine(s, rest, half, turn)


@compiled
def apply_gelu(
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
def apply_wave(
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
def apply_norm(
    K: Array, theta: Array, margin: int, size: int, F1: Array, F2: Array, one_: int, two_: int
) -> None:
    """K and Θ after a norm."""
    count, start, a, b = np.uintp(size), np.uintp(margin), np.uintp(one_), np.uintp(two_)
    for j in range(count):
        i = j + start
        share = F1[a + j] * F2[b + j]
        K[i] *= share
        theta[i] *= share


# --- What the layers do to one tile: K and Θ at all pixels p for one offset, as flat arrays.
#
# A tile holds `size` numbers after a margin. Its rows are `stride` apart, its planes `plane`, and end in zeros,
# which stand for the pixels outside the image, or in pixels of its other side; a window reads its neighbours at
# fixed distances, across rows, and finds them. The functions read and write whole tiles, what is outside
# included: variances of zero there make zeros of it again, or it is cleared.
#
#     r₁, r₂    √q at p and at p + o           m = s Σ K + b
#     i₁, i₂    1/√q, or zero where q is       w = s Σ Θ + α Σ K + β
#     R = r₁r₂, ρ = m i₁ i₂:                   K′ = R (k (sin ϑ − ρϑ) + hρ),  Θ′ = w (h − kϑ)


@compiled
def apply_weights(K: Array, theta: Array, margin: int, size: int, weights: Array) -> None:
    """Weights act on sums over a window: K ← s K + b, Θ ← s Θ + α K + β."""
    count, start = np.uintp(size), np.uintp(margin)
    s, b, alpha, beta = weights[0], weights[1], weights[2], weights[3]
    for j in range(count):
        i = j + start
        mixed = K[i]
        theta[i] = s * theta[i] + alpha * mixed + beta
        K[i] = s * mixed + b


@compiled
def apply_bent_line(
    K: Array,
    theta: Array,
    sums: Array,
    lows: Array,
    margin: int,
    size: int,
    step: int,
    weights: Array,
    equal: Any,
    F1: Array,
    F2: Array,
    r1: int,
    i1: int,
    r2: int,
    i2: int,
) -> None:
    """K and Θ after weights and a bent line, of sums over a window without the rows beside (`step` apart) or with them.

    Correlations within `equal` of one count as one.
    """
    wide()
    count, start, row = np.uintp(size), np.uintp(margin), np.uintp(step)
    ra, ia, rb, ib = np.uintp(r1), np.uintp(i1), np.uintp(r2), np.uintp(i2)
    s, b, alpha, beta = weights[0], weights[1], weights[2], weights[3]
    beside, k, h = weights[4], weights[5], weights[6]
    zero, one, two, pi = (
        weights.dtype.type(0),
        weights.dtype.type(1),
        weights.dtype.type(2),
        weights.dtype.type(np.pi),
    )
    for j in range(count):
        i = j + start
        mixed = sums[i] + beside * (sums[i - row] + sums[i + row])
        learned = s * (lows[i] + beside * (lows[i - row] + lows[i + row])) + alpha * mixed + beta
        mixed = s * mixed + b
        root = F1[ra + j] * F2[rb + j]
        rho = mixed * F1[ia + j] * F2[ib + j]
        short = abs(rho)
        rest = one - short
        rest = rest if rest > equal else zero
        v, t = np.sqrt(rest), two * short - one
        theta_, value = v * angle(t), v * rest * gap(t)
        if rho < zero:
            theta_ = pi - theta_
            value = value - pi * rho
        slope = h - k * theta_
        slope = slope if root > zero else zero
        K[i] = root * (k * value + h * rho)
        theta[i] = learned * slope


@compiled
def across_and_behind(
    source: Array,
    target: Array,
    between: Array,
    margin: int,
    size: int,
    across: int,
    behind: int,
    plane: int,
) -> None:
    """The sums over neighbours in a row and, first, in other planes."""
    if behind > 0:
        sum_window(source, between, margin, size, behind, plane)
        source = between
    sum_window(source, target, margin, size, across, 1)


@compiled
def apply_operations(
    operations: Array,
    weights: Array,
    work: Array,
    margin: int,
    size: int,
    stride: int,
    plane: int,
    equal: Any,
    F1: Array,
    F2: Array,
    first: int,
    second: int,
    pitch: int,
    pitch2: int,
    inside: Array,
    halo: Array,
    numbers: Array,
) -> None:
    """A tile through all layers; register k holds K in work[2k] and Θ in work[2k + 1], the last four rows are scratch.

    Field f of the left side begins at first + f · pitch, and of the right side at second + f · pitch2. If the left side
    is one example its fields are numbers as well.
    """
    weights, work, numbers, F1, F2 = lent(weights), lent(work), lent(numbers), lent(F1), lent(F2)
    last = work.shape[0]
    sums, lows, more, deep = work[last - 4], work[last - 3], work[last - 2], work[last - 1]
    for step in range(operations.shape[0]):
        kind, register, other = operations[step, 0], operations[step, 1], operations[step, 2]
        K, theta, field = work[2 * register], work[2 * register + 1], operations[step, 6]
        a, b = first + field * pitch, second + field * pitch2
        if kind in (BEND, WEIGH):  # a window sum first, along one axis after the other
            across, down, behind = operations[step, 3], operations[step, 4], operations[step, 5]
            if kind == WEIGH and across + down + behind == 0:
                apply_weights(K, theta, margin, size, weights[step])
                continue
            across_and_behind(K, sums, more, margin, size, across, behind, plane)
            across_and_behind(theta, lows, more, margin, size, across, behind, plane)
            if kind == WEIGH:
                sum_window(sums, K, margin, size, down, stride)
                sum_window(lows, theta, margin, size, down, stride)
                apply_weights(K, theta, margin, size, weights[step])
                continue
            if down > 1:
                sum_window(sums, more, margin, size, down, stride)
                sum_window(lows, deep, margin, size, down, stride)
                sums, more, lows, deep = more, sums, deep, lows
            row = weights[step]
            apply_bent_line(
                K,
                theta,
                sums,
                lows,
                margin,
                size,
                stride,
                row,
                equal,
                F1,
                F2,
                a,
                a + pitch,
                b,
                b + pitch2,
            )
        # branches of the network
        elif kind == COPY:
            copy_tile(K, work[2 * other], margin, size)
            copy_tile(theta, work[2 * other + 1], margin, size)
        elif kind == ADD:
            add_tile(work[2 * other], K, margin, size)
            add_tile(work[2 * other + 1], theta, margin, size)
        # what a window sees outside the image
        elif kind == CLEAR:
            cleared(K, inside, margin, size)
            cleared(theta, inside, margin, size)
        elif kind == WRAP:
            wrapped(K, halo, margin)
            wrapped(theta, halo, margin)
        else:
            terms = operations[step, 7] - field - 2
            apply_activation(
                kind,
                weights[step],
                terms,
                numbers[field : field + terms + 2],
                sums,
                lows,
                more,
                K,
                theta,
                margin,
                size,
                equal > 1,
                F1,
                F2,
                a,
                b,
                pitch,
                pitch2,
            )
