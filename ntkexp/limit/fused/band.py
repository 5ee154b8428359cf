"""The operations on one band. A band holds the kernels K (NNGP) and Θ (tangent) of two
examples for one offset o, as flat arrays. It pairs each pixel p with pixel p + o.

Compiled functions take their arguments in named tuples,
which numba passes without overhead."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ntkexp.covariance.pairs import (
    ADD,
    ARC,
    BEND,
    CLEAR,
    COPY,
    GATE,
    NORM,
    SERIES,
    WEIGH,
    WRAP,
)
from ntkexp.layer.smooth import TOGETHER
from ntkexp.limit.fused.functions import (
    add_band,
    angle,
    arc_sine,
    clear_outside,
    compiled,
    copy_band,
    exponential,
    fill_halo,
    gap,
    lent,
    sum_window,
    wide,
)

Array = np.ndarray[Any, Any]
Index = int | np.signedinteger[Any]


# --- Arguments
#
# The gaps between the rows of a band represent pixels outside the image: they hold
# zeros or, in a periodic image, copies of pixels from the opposite side. A window can
# therefore read the neighbours of a pixel at fixed distances, even beyond the end of a
# row. All functions process whole bands, including the gaps. Most activations keep the
# gaps zero, because the fields in the gaps are zero. After other operations, CLEAR sets
# them to zero.


class BandShape(NamedTuple):
    """The layout of a flat band: `size` numbers between two margins of `margin` zeros.
    Rows begin `stride` numbers apart, and planes begin `plane` numbers apart."""

    margin: Index
    size: Index
    stride: Index
    plane: Index


class KernelBand(NamedTuple):
    """The NNGP kernel and the tangent kernel of a pair of examples at one offset."""

    K: Array
    theta: Array


class PairFields(NamedTuple):
    """Fields of the two examples of a pair: functions of the variance at each pixel.

    Field f of the left example begins at `left_start` + f · `left_pitch`, and field f
    of the right example at `right_start` + f · `right_pitch`. For vectors, each field
    of the left example is a single number, `numbers`[f]. If 1 − |ρ| ≤ `equal`, the
    correlation ρ counts as ±1. If an example is paired with itself at offset 0, every
    correlation is 1. For this pair, `equal` is 2."""

    left: Array
    right: Array
    left_start: Index
    right_start: Index
    left_pitch: Index
    right_pitch: Index
    equal: Any
    numbers: Array


class CompiledProgram(NamedTuple):
    """The operations of a level, their weights, the number of registers, and the
    tolerance `equal` of `PairFields`.
    """

    operations: Array
    weights: Array
    registers: int
    equal: Any


class Scratch(NamedTuple):
    """Temporary bands, whose margins are always zero."""

    sum_kernel: Array
    sum_theta: Array
    spare: Array
    spare2: Array


class BandGaps(NamedTuple):
    """The gaps of a band. `inside` is 1 in the image and 0 in gaps. `halo` lists the
    positions in gaps, and the pixels that are copied to them, [2, copy]."""

    inside: Array
    halo: Array


@compiled
def positions(
    shape: BandShape, fields: PairFields, field: int
) -> tuple[np.uintp, np.uintp, np.uintp, np.uintp]:
    """Return the size and the margin of a band, and the positions at which a field of
    the left and the right example begins."""
    return (
        np.uintp(shape.size),
        np.uintp(shape.margin),
        np.uintp(fields.left_start + field * fields.left_pitch),
        np.uintp(fields.right_start + field * fields.right_pitch),
    )


# --- Smooth activations: power series in the correlation ρ,
# with precomputed coefficients b_k
#
#     K′ = a₀a₀ + K Σ_k b_k b_k ρᵏ/(k + 1),    Θ′ = Θ Σ_k b_k b_k ρᵏ
#
# a₀ = E σ and b_k are fields. Each product has one factor from each example. Horner's
# scheme evaluates both series as polynomials in t, from the last power to the first. It
# adds four terms at a time, so that each sum is read and written less often. If the
# activation σ is odd or even, only every second power occurs, and t = ρ². Otherwise t =
# ρ. For even σ, `finish_series` multiplies by the remaining factor ρ.


@compiled
def start_series(
    band: KernelBand,
    sums: KernelBand,
    t: Array,
    shape: BandShape,
    fields: PairFields,
    field: int,
    increment: int,
) -> None:
    """Set both sums to zero, and compute t = ρ (the correlation), or t = ρ² if only
    every second power occurs."""
    wide()
    K = band.K
    value = sums.K
    slope = sums.theta
    F1 = fields.left
    F2 = fields.right
    count, start, a, b = positions(shape, fields, field)
    for j in range(count):
        rho = K[j + start] * F1[a + j] * F2[b + j]
        t[j] = rho * rho if increment == 2 else rho
        value[j] = 0
        slope[j] = 0


@compiled
def add_terms(
    sums: KernelBand, t: Array, size: int, shares: Array, fields: PairFields, field: int
) -> None:
    """Add four terms to the power series of K′ and Θ′. The coefficients b_k of both
    examples are the four fields from number `field` on. `shares` holds the four factors
    1/(k + 1) in K′."""
    wide()
    value = sums.K
    slope = sums.theta
    F1 = fields.left
    F2 = fields.right
    w0 = shares[0]
    w1 = shares[1]
    w2 = shares[2]
    w3 = shares[3]
    pitch = fields.left_pitch
    pitch2 = fields.right_pitch
    a_ = fields.left_start + field * pitch
    b_ = fields.right_start + field * pitch2
    a = np.uintp(a_)
    a1 = np.uintp(a_ + pitch)
    a2 = np.uintp(a_ + 2 * pitch)
    a3 = np.uintp(a_ + 3 * pitch)
    b = np.uintp(b_)
    b1 = np.uintp(b_ + pitch2)
    b2 = np.uintp(b_ + 2 * pitch2)
    b3 = np.uintp(b_ + 3 * pitch2)
    for j in range(np.uintp(size)):
        x = t[j]
        p0 = F1[a + j] * F2[b + j]
        p1 = F1[a1 + j] * F2[b1 + j]
        p2 = F1[a2 + j] * F2[b2 + j]
        p3 = F1[a3 + j] * F2[b3 + j]
        slope[j] = p0 + x * (p1 + x * (p2 + x * (p3 + x * slope[j])))
        value[j] = w0 * p0 + x * (
            w1 * p1 + x * (w2 * p2 + x * (w3 * p3 + x * value[j]))
        )


@compiled
def add_terms_of_one_vector(
    sums: KernelBand, t: Array, size: int, shares: Array, fields: PairFields, field: int
) -> None:
    """Add four terms as in `add_terms`, for vectors.
    The left coefficients are single numbers."""
    wide()
    value = sums.K
    slope = sums.theta
    numbers = fields.numbers
    F2 = fields.right
    w0 = shares[0]
    w1 = shares[1]
    w2 = shares[2]
    w3 = shares[3]
    n0 = numbers[field]
    n1 = numbers[field + 1]
    n2 = numbers[field + 2]
    n3 = numbers[field + 3]
    pitch2 = fields.right_pitch
    b_ = fields.right_start + field * pitch2
    b = np.uintp(b_)
    b1 = np.uintp(b_ + pitch2)
    b2 = np.uintp(b_ + 2 * pitch2)
    b3 = np.uintp(b_ + 3 * pitch2)
    for j in range(np.uintp(size)):
        x = t[j]
        p0 = n0 * F2[b + j]
        p1 = n1 * F2[b1 + j]
        p2 = n2 * F2[b2 + j]
        p3 = n3 * F2[b3 + j]
        slope[j] = p0 + x * (p1 + x * (p2 + x * (p3 + x * slope[j])))
        value[j] = w0 * p0 + x * (
            w1 * p1 + x * (w2 * p2 + x * (w3 * p3 + x * value[j]))
        )


@compiled
def finish_series(
    band: KernelBand,
    sums: KernelBand,
    shape: BandShape,
    fields: PairFields,
    field: int,
    lowest: int,
) -> None:
    """Compute the kernels after the activation, K′ and Θ′, from `sums`, the sums of
    both series. If `lowest`, the lowest power of ρ in Θ′, is 1, multiply both sums by
    ρ."""
    wide()
    K = band.K
    theta = band.theta
    value = sums.K
    slope = sums.theta
    F1 = fields.left
    F2 = fields.right
    count, start, a, b = positions(shape, fields, field)
    _, _, a0, b0 = positions(shape, fields, field + 1)
    for j in range(count):
        i = j + start
        rho = K[i] * F1[a + j] * F2[b + j] if lowest else K.dtype.type(1)
        K[i] = F1[a0 + j] * F2[b0 + j] + K[i] * rho * value[j]
        theta[i] *= rho * slope[j]


@compiled
def apply_series(
    program: CompiledProgram,
    step: int,
    scratch: Scratch,
    band: KernelBand,
    shape: BandShape,
    fields: PairFields,
) -> None:
    """Apply a smooth activation σ by its power series. Its fields are 1/√q for the
    variance q, the mean a₀ = E σ, and the coefficients b_k of σ′."""
    weights = program.weights[step]
    field = program.operations[step, 6]
    terms = program.operations[step, 7] - field - 2
    lowest = int(weights[5])
    increment = int(weights[6])  # 2 if only every second power occurs
    # leave the margins of the sums zero, because windows read them
    margin = shape.margin
    sums = KernelBand(scratch.sum_kernel[margin:], scratch.sum_theta[margin:])
    t = scratch.spare[margin:]
    start_series(band, sums, t, shape, fields, field, increment)
    for k in range(terms - TOGETHER, -1, -TOGETHER):
        powers = lowest + 1 + increment * np.arange(k, k + TOGETHER)
        shares = weights.dtype.type(1) / powers.astype(weights.dtype)
        if fields.numbers.shape[0]:
            add_terms_of_one_vector(sums, t, shape.size, shares, fields, field + 2 + k)
        else:
            add_terms(sums, t, shape.size, shares, fields, field + 2 + k)
    finish_series(band, sums, shape, fields, field, lowest)


# --- Other activations and norms, from fields a₁ and a₂ of the two examples
#
#     erf     a = 1/√(1 + 2q), s = 2K a₁a₂:     K′ = (2/π) arcsin s,  Θ′ = Θ (4/π) a₁a₂/√(1 − s²)
#     GELU    a = 1/√(1 + q),  s = K a₁a₂:      with g = √(1 − s²), A = a₁²a₂², φ = ¼ + arcsin(s)/2π
#             K′ = √A/2π · (s²/g + q₁q₂g) + Kφ
#             Θ′ = Θ (s/(2πg) · (A/g² + (1 − q₁q₂)A + 1) + φ)
#     sine    a = b²q/2:                        e± = exp(∓b²K − a₁ − a₂), e₊ times cos 2c₀
#             K′ = (a²/2)(e₋ − e₊),  Θ′ = Θ (a²b²/2)(e₋ + e₊)
#     norm    a = 1/√(q + ε):                   K′ = K a₁a₂,  Θ′ = Θ a₁a₂
#
# For the sine a sin(bz + c₀), a² is the squared amplitude. If a pixel is paired with
# itself, 1 − s = a₁a₂ for erf and GELU, and b²K = a₁ + a₂ for the sine. The code uses
# these values, which avoid cancellation. For all pairs, 1 − |s| > a₁a₂/2. The code
# enforces this bound, which rounding could violate.


@compiled
def apply_activation(
    program: CompiledProgram,
    step: int,
    scratch: Scratch,
    band: KernelBand,
    shape: BandShape,
    fields: PairFields,
) -> None:
    kind = program.operations[step, 0]
    field = program.operations[step, 6]
    if kind == NORM:
        apply_norm(band, shape, fields, field)
    elif kind == ARC:
        apply_erf(band, shape, fields, field)
    elif kind == GATE:
        apply_gelu(band, shape, fields, field)
    elif kind == SERIES:
        apply_series(program, step, scratch, band, shape, fields)
    else:
        apply_wave(band, shape, fields, field, program.weights[step, 5:])


@compiled
def apply_erf(
    band: KernelBand, shape: BandShape, fields: PairFields, field: int
) -> None:
    K = band.K
    theta = band.theta
    F1 = fields.left
    F2 = fields.right
    itself = fields.equal > 1
    count, start, a, b = positions(shape, fields, field)
    number = K.dtype.type
    half = number(0.5)
    one = number(1)
    quarter_turn = number(np.pi / 2)
    value_factor = number(2 / np.pi)
    slope_factor = number(4 / np.pi)
    for j in range(count):
        i = j + start
        product = F1[a + j] * F2[b + j]
        s = K[i] * (product + product)
        rest = product if itself else max(one - abs(s), half * product)  # 1 − |s|
        rest = rest if product > 0 else one
        theta[i] *= slope_factor * product / np.sqrt(rest * (one + abs(s)))
        K[i] = value_factor * arc_sine(s, rest, half, quarter_turn)


@compiled
def apply_gelu(
    band: KernelBand, shape: BandShape, fields: PairFields, field: int
) -> None:
    """Apply GELU. Its fields are a = 1/√(1 + q) and the variance q."""
    K = band.K
    theta = band.theta
    F1 = fields.left
    F2 = fields.right
    itself = fields.equal > 1
    count, start, a, b = positions(shape, fields, field)
    _, _, qa, qb = positions(shape, fields, field + 1)
    number = K.dtype.type
    half = number(0.5)
    one = number(1)
    quarter_turn = number(np.pi / 2)
    quarter = number(0.25)
    by_circle = number(0.5 / np.pi)
    for j in range(count):
        i = j + start
        root_A = F1[a + j] * F2[b + j]
        q1q2 = F1[qa + j] * F2[qb + j]
        c = K[i]
        s = c * root_A
        rest = root_A if itself else max(one - abs(s), half * root_A)  # 1 − |s|
        rest = rest if root_A > 0 else one
        g_squared = rest * (one + abs(s))
        g = np.sqrt(g_squared)
        A = root_A * root_A
        phi = quarter + by_circle * arc_sine(s, rest, half, quarter_turn)
        K[i] = by_circle * root_A * (s * s / g + q1q2 * g) + c * phi
        theta[i] *= by_circle * s / g * (A / g_squared + (one - q1q2) * A + one) + phi


@compiled
def apply_wave(
    band: KernelBand, shape: BandShape, fields: PairFields, field: int, constants: Array
) -> None:
    """Apply a sine, a sin(bz + c₀). The constants are a²/2, b² and cos 2c₀."""
    wide()
    K = band.K
    theta = band.theta
    F1 = fields.left
    F2 = fields.right
    itself = fields.equal > 1
    count, start, a, b = positions(shape, fields, field)
    scale = constants[0]
    b_squared = constants[1]
    phase = constants[2]
    for j in range(count):
        i = j + start
        both = F1[a + j] + F2[b + j]
        moved = both if itself else b_squared * K[i]
        # e₋ and e₊, as defined above `apply_activation`
        near = exponential(moved - both)
        far = phase * exponential(-moved - both)
        K[i] = scale * (near - far)
        theta[i] *= scale * b_squared * (near + far)


@compiled
def apply_norm(
    band: KernelBand, shape: BandShape, fields: PairFields, field: int
) -> None:
    K = band.K
    theta = band.theta
    F1 = fields.left
    F2 = fields.right
    count, start, a, b = positions(shape, fields, field)
    for j in range(count):
        i = j + start
        factor = F1[a + j] * F2[b + j]
        K[i] *= factor
        theta[i] *= factor


# --- Affine layers, and piecewise-linear activations such as ReLU
#
#     m = s Σ K + b,   w = s Σ Θ + α Σ K + β             kernels after the affine layer; Σ over a window
#     K′ = R (k (sin ϑ − ρϑ) + hρ),   Θ′ = w (h − kϑ)    kernels after the activation, with ϑ = arccos ρ
#
# Each of the pixels p and p + o has two fields: r = √q, and i = 1/√q (0 if q = 0). R =
# r₁r₂ and ρ = m i₁ i₂. The constants of the activation are k and h (see
# `AbstractBent`).


@compiled
def apply_weights(band: KernelBand, shape: BandShape, weights: Array) -> None:
    """Apply an affine layer with `weights` = (s, b, α, β) to the sums K and Θ over a
    window. First Θ ← s Θ + α K + β, then K ← s K + b."""
    K = band.K
    theta = band.theta
    count = np.uintp(shape.size)
    start = np.uintp(shape.margin)
    s = weights[0]
    b = weights[1]
    alpha = weights[2]
    beta = weights[3]
    for j in range(count):
        i = j + start
        window_sum = K[i]
        theta[i] = s * theta[i] + alpha * window_sum + beta
        K[i] = s * window_sum + b


@compiled
def apply_bent_line(
    band: KernelBand,
    sums: KernelBand,
    shape: BandShape,
    weights: Array,
    fields: PairFields,
    field: int,
) -> None:
    """Apply an affine layer and a piecewise-linear activation to sums over a window.

    If the window has three rows, weights[4] = 1 and the loop adds the sums
    of the rows above and below."""
    wide()
    K = band.K
    theta = band.theta
    sum_kernel = sums.K
    sum_theta = sums.theta
    F1 = fields.left
    F2 = fields.right
    equal = fields.equal
    row = np.uintp(shape.stride)
    count, start, ra, rb = positions(shape, fields, field)
    _, _, ia, ib = positions(shape, fields, field + 1)
    s = weights[0]
    b = weights[1]
    alpha = weights[2]
    beta = weights[3]
    other_rows = weights[4]
    k = weights[5]
    h = weights[6]
    number = weights.dtype.type
    zero = number(0)
    one = number(1)
    two = number(2)
    pi = number(np.pi)
    for j in range(count):
        i = j + start
        # m (`mixed`) and w (`learned`) of the formulas above
        mixed = sum_kernel[i] + other_rows * (sum_kernel[i - row] + sum_kernel[i + row])
        learned = (
            s * (sum_theta[i] + other_rows * (sum_theta[i - row] + sum_theta[i + row]))
            + alpha * mixed
            + beta
        )
        mixed = s * mixed + b
        # |ρ| and 1 − |ρ|
        root = F1[ra + j] * F2[rb + j]
        rho = mixed * F1[ia + j] * F2[ib + j]
        magnitude = abs(rho)
        rest = one - magnitude
        rest = rest if rest > equal else zero
        # ϑ and sin ϑ − ρϑ for |ρ|, then for ρ
        v = np.sqrt(rest)
        t = two * magnitude - one
        theta_ = v * angle(t)
        value = v * rest * gap(t)
        if rho < zero:
            theta_ = pi - theta_
            value = value - pi * rho
        slope = h - k * theta_
        slope = slope if root > zero else zero
        K[i] = root * (k * value + h * rho)
        theta[i] = learned * slope


# --- All operations


@compiled
def sum_across_and_behind(
    source: Array,
    target: Array,
    spare: Array,
    shape: BandShape,
    across: int,
    behind: int,
) -> None:
    """Sum over neighbours in other planes (up to `behind`), then over neighbours in the
    row (up to `across`)."""
    if behind > 0:
        sum_window(source, spare, shape.margin, shape.size, behind, shape.plane)
        source = spare
    sum_window(source, target, shape.margin, shape.size, across, 1)


@compiled
def apply_window(
    program: CompiledProgram,
    step: int,
    scratch: Scratch,
    band: KernelBand,
    shape: BandShape,
    fields: PairFields,
) -> None:
    """Apply an affine layer, fused with a piecewise-linear activation
    if the operation is BEND."""
    operations = program.operations
    weights = program.weights[step]
    kind = operations[step, 0]
    across = operations[step, 3]
    down = operations[step, 4]
    behind = operations[step, 5]
    margin = shape.margin
    size = shape.size
    stride = shape.stride
    if kind == WEIGH and across + down + behind == 0:
        apply_weights(band, shape, weights)
        return
    # Sum along one axis after the other.
    sums = KernelBand(scratch.sum_kernel, scratch.sum_theta)
    sum_across_and_behind(band.K, sums.K, scratch.spare, shape, across, behind)
    sum_across_and_behind(band.theta, sums.theta, scratch.spare, shape, across, behind)
    if kind == WEIGH:
        sum_window(sums.K, band.K, margin, size, down, stride)
        sum_window(sums.theta, band.theta, margin, size, down, stride)
        apply_weights(band, shape, weights)
        return
    if down > 1:  # for three rows, apply_bent_line adds the rows
        sum_window(sums.K, scratch.spare, margin, size, down, stride)
        sum_window(sums.theta, scratch.spare2, margin, size, down, stride)
        sums = KernelBand(scratch.spare, scratch.spare2)
    apply_bent_line(band, sums, shape, weights, fields, operations[step, 6])


@compiled
def apply_operations(
    program: CompiledProgram,
    work: Array,
    shape: BandShape,
    fields: PairFields,
    gaps: BandGaps,
) -> None:
    """Apply all operations of a level to a band.

    Register k holds K in work[2k] and Θ in work[2k + 1].
    The last four rows of `work` are scratch."""
    # Take views without reference counts (see `lent`).
    work = lent(work)
    program = lent(program)
    fields = lent(fields)
    operations = program.operations
    margin = shape.margin
    size = shape.size
    last = work.shape[0]
    scratch = Scratch(work[last - 4], work[last - 3], work[last - 2], work[last - 1])
    for step in range(operations.shape[0]):
        kind = operations[step, 0]
        register = operations[step, 1]
        other = operations[step, 2]
        band = KernelBand(work[2 * register], work[2 * register + 1])
        if kind in (BEND, WEIGH):
            apply_window(program, step, scratch, band, shape, fields)
        elif kind == COPY:
            copy_band(band.K, work[2 * other], margin, size)
            copy_band(band.theta, work[2 * other + 1], margin, size)
        elif kind == ADD:
            add_band(work[2 * other], band.K, margin, size)
            add_band(work[2 * other + 1], band.theta, margin, size)
        elif kind == CLEAR:
            clear_outside(band.K, gaps.inside, margin, size)
            clear_outside(band.theta, gaps.inside, margin, size)
        elif kind == WRAP:
            fill_halo(band.K, gaps.halo, margin)
            fill_halo(band.theta, gaps.halo, margin)
        else:
            apply_activation(program, step, scratch, band, shape, fields)
