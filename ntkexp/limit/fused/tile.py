"""What the layers do to one tile: K and Θ at all pixels p for one offset, as flat arrays.

A tile holds `size` numbers after a margin. Its rows are `stride` apart, its planes `plane`, and end in zeros, which
stand for the pixels outside the image, or in pixels of its other side; a window reads its neighbours at fixed
distances, across rows, and finds them. The functions read and write whole tiles, what is outside included: variances of
zero there make zeros of it again, or it is cleared.

    r₁, r₂    √q at p and at p + o           m = s Σ K + b
    i₁, i₂    1/√q, or zero where q is       w = s Σ Θ + α Σ K + β
    R = r₁r₂, ρ = m i₁ i₂:                   K′ = R (k (sin ϑ − ρϑ) + hρ),  Θ′ = w (h − kϑ)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.covariance.operation import ADD, BEND, CLEAR, COPY, WEIGH, WRAP
from ntkexp.limit.fused.arc_cosine import angle, gap
from ntkexp.limit.fused.curves import curved
from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.lent import lent
from ntkexp.limit.fused.loops import added, cleared, copied, summed, wrapped
from ntkexp.limit.fused.wide import wide

Array = np.ndarray[Any, Any]


@compiled
def weighed(K: Array, theta: Array, margin: int, size: int, weights: Array) -> None:
    """Weights act on sums over a window: K ← s K + b, Θ ← s Θ + α K + β."""
    count, start = np.uintp(size), np.uintp(margin)
    s, b, alpha, beta = weights[0], weights[1], weights[2], weights[3]
    for j in range(count):
        i = j + start
        mixed = K[i]
        theta[i] = s * theta[i] + alpha * mixed + beta
        K[i] = s * mixed + b


@compiled
def bent(
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
    zero, one, two, pi = weights.dtype.type(0), weights.dtype.type(1), weights.dtype.type(2), weights.dtype.type(np.pi)
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
    source: Array, target: Array, between: Array, margin: int, size: int, across: int, behind: int, plane: int
) -> None:
    """The sums over neighbours in a row and, first, in other planes."""
    if behind > 0:
        summed(source, between, margin, size, behind, plane)
        source = between
    summed(source, target, margin, size, across, 1)


@compiled
def walked(
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
        if kind in (BEND, WEIGH):
            across, down, behind = operations[step, 3], operations[step, 4], operations[step, 5]
            if kind == WEIGH and across + down + behind == 0:
                weighed(K, theta, margin, size, weights[step])
                continue
            across_and_behind(K, sums, more, margin, size, across, behind, plane)
            across_and_behind(theta, lows, more, margin, size, across, behind, plane)
            if kind == WEIGH:
                summed(sums, K, margin, size, down, stride)
                summed(lows, theta, margin, size, down, stride)
                weighed(K, theta, margin, size, weights[step])
                continue
            if down > 1:
                summed(sums, more, margin, size, down, stride)
                summed(lows, deep, margin, size, down, stride)
                sums, more, lows, deep = more, sums, deep, lows
            row = weights[step]
            bent(K, theta, sums, lows, margin, size, stride, row, equal, F1, F2, a, a + pitch, b, b + pitch2)
        elif kind == COPY:
            copied(K, work[2 * other], margin, size)
            copied(theta, work[2 * other + 1], margin, size)
        elif kind == ADD:
            added(work[2 * other], K, margin, size)
            added(work[2 * other + 1], theta, margin, size)
        elif kind == CLEAR:
            cleared(K, inside, margin, size)
            cleared(theta, inside, margin, size)
        elif kind == WRAP:
            wrapped(K, halo, margin)
            wrapped(theta, halo, margin)
        else:
            terms = operations[step, 7] - field - 2
            curved(
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
