"""Functions of one number with a closed form for their slope.

    Δσ(z) = D · Δz        D = (σ(z₁) − σ(z₀))/(z₁ − z₀), and σ′(z) where z₁ = z₀

So D closes by its definition: D · (z₁ − z₀) = σ(z₁) − σ(z₀). As a quotient it would lose the digits of the slope where
d = z₁ − z₀ is tiny, so it is written without cancellation, in a closed form of its own for each function. Below, m is
the mean (z₀ + z₁)/2. Only what is linear on both sides of a kink is a quotient: on one side it is 0 or 1 exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log as ln
from math import pi, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from ntkexp.kernel.secant.call import Call
from ntkexp.kernel.secant.rules.base import Rule, Slope

NODES = ((-sqrt(0.6), 5 / 18), (0.0, 8 / 18), (sqrt(0.6), 5 / 18))
NEAR = 0.02  # over this length three Gauss nodes leave (0.02)⁷/2e6 of the sixth derivative, less than rounding


def quotient(above: Tensor, below: Tensor, limit: Tensor | float) -> Tensor:
    """above / below, and the limit where below is zero."""
    return torch.where(below == 0, limit, above / below)


def tanhc(d: Tensor) -> Tensor:
    """tanh(d)/d, which is 1 to rounding for all |d| up to eps."""
    size = away_from_zero(d)
    return torch.tanh(size) / size


def away_from_zero(d: Tensor) -> Tensor:
    """|d|, or eps where that is larger."""
    return d.abs().clamp_min(torch.finfo(d.dtype).eps)


def sinc(d: Tensor) -> Tensor:
    """sin(d)/d."""
    return torch.sinc(d / pi)


def relu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """(relu z₀ + relu z₁)/(|z₀| + |z₁|), with |z| = 2 relu(z) − z, and 0 where both ends are zero.

    On one side of the kink it is 0 or 1; across it relu z₁/(z₁ + |z₀|) = (relu z₁ − relu z₀)/(z₁ − z₀).
    """
    mean = torch.lerp(torch.relu(z0), torch.relu(z1), 0.5)
    size = torch.lerp(torch.lerp(z0, z1, 0.5), mean, 2.0)
    kind = torch.finfo(size.dtype)
    return mean / size.clamp_min(kind.tiny * kind.eps)  # the smallest number there is


def leaky_relu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """a + (1 − a) D_relu, since the function is a z + (1 − a) relu(z)."""
    slope: float = call.given["negative_slope"]
    return slope + (1 - slope) * relu(call, z0, z1)


def absolute(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """(|z₁| − |z₀|)/d: nothing cancels on one side of zero, where it is ±1 exactly."""
    return quotient(z1.abs() - z0.abs(), z1 - z0, z0.sign())


def tanh(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """(1 − t₀t₁) · tanh(d)/d, from tanh(z₁ − z₀) = (t₁ − t₀)/(1 − t₀t₁)."""
    return (1 - torch.tanh(z0) * torch.tanh(z1)) * tanhc(z1 - z0)


def sigmoid(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """½ [s₀ + s₁ − 2s₀s₁] · tanh(d/2)/(d/2), from tanh(d/2) = (s₁ − s₀)/(s₀ + s₁ − 2s₀s₁)."""
    s0, s1, size = torch.sigmoid(z0), torch.sigmoid(z1), away_from_zero(z1 - z0)
    return torch.addcmul(s0 + s1, s0, s1, value=-2) * (torch.tanh(size / 2) / size)


def silu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """s̄ + m · D_sigmoid: the product rule Δ(zs) = s̄ Δz + z̄ Δs."""
    return (torch.sigmoid(z0) + torch.sigmoid(z1)) / 2 + (z0 + z1) / 2 * sigmoid(call, z0, z1)


def erf(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """The quotient, or Gauss nodes of 2/√π · e^(−z²) where the ends are near: there is no closed form."""
    return gauss_or_quotient(z0, z1, torch.erf, lambda z: 2 / sqrt(pi) * torch.exp(-z * z))


def gelu(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """Φ̄ + m · D_Φ: the product rule for zΦ(z), Φ(z) = ½(1 + erf(z/√2))."""
    if call.given["approximate"] == "tanh":
        return gelu_tanh(call, z0, z1)
    r = sqrt(0.5)
    normal = (2 + torch.erf(z0 * r) + torch.erf(z1 * r)) / 4
    return normal + (z0 + z1) / 2 * (r / 2) * erf(call, z0 * r, z1 * r)


def gelu_tanh(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """½(1 + mean tanh u) + ½ m · D_tanh(u) D_u, for ½z(1 + tanh u) with u = c(z + 0.044715 z³), c = √(2/π), and
    D_u = c(1 + 0.044715 (z₀² + z₀z₁ + z₁²)).
    """
    c = sqrt(2 / pi)
    u0, u1 = (c * (z + 0.044715 * z**3) for z in (z0, z1))
    inner = c * (1 + 0.044715 * (z0 * z0 + z0 * z1 + z1 * z1))
    return (2 + torch.tanh(u0) + torch.tanh(u1)) / 4 + (z0 + z1) / 4 * tanh(call, u0, u1) * inner


def sin(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """cos m · sin(d/2)/(d/2)."""
    return torch.cos((z0 + z1) / 2) * sinc((z1 - z0) / 2)


def cos(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """−sin m · sin(d/2)/(d/2)."""
    return -torch.sin((z0 + z1) / 2) * sinc((z1 - z0) / 2)


def exp(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """e^max · (1 − e^−|d|)/|d|, the logarithmic mean of e^z₀ and e^z₁."""
    return log_mean(z0, z1)


def log_mean(l0: Tensor, l1: Tensor) -> Tensor:
    """(e^l₁ − e^l₀)/(l₁ − l₀) = e^max (1 − e^−|d|)/|d|; zero where both are −∞."""
    d = torch.where(l0 == l1, 0.0, (l1 - l0).abs())
    return torch.maximum(l0, l1).exp() * quotient(-torch.expm1(-d), d, 1.0).nan_to_num(0.0, posinf=0.0)


def root(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """1/(√z₀ + √z₁); 0 where both are zero: there is no change, and autograd has no number either."""
    return quotient(torch.ones_like(z0), z0.sqrt() + z1.sqrt(), 0.0)


def rsqrt(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """−(r₀r₁)²/(r₀ + r₁), r = 1/√z."""
    r0, r1 = z0.rsqrt(), z1.rsqrt()
    return -((r0 * r1) ** 2) / (r0 + r1)


def reciprocal(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """−1/(z₀z₁)."""
    return -1 / (z0 * z1)


def gauss_or_quotient(
    z0: Tensor, z1: Tensor, function: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]
) -> Tensor:
    """The quotient, or three Gauss nodes of the derivative where the ends are near."""
    m, d = (z0 + z1) / 2, z1 - z0
    gauss = torch.zeros_like(m)
    for node, weight in NODES:
        gauss = gauss + weight * derivative(m + node / 2 * d)
    return torch.where(d.abs() <= NEAR, gauss, quotient(function(z1) - function(z0), d, 0.0))


def elementwise(slope: Slope, call: Call) -> Tensor:
    """Δσ = D · Δz; at a point D is σ′, from σ(z) on the tape where that is cheaper."""
    value, derivative = call.args[0], DERIVATIVES.get(call.entry.name)
    if call.is_point and derivative is not None:
        return call.slope(value, lambda z, _: derivative(z, call.start)) * call.delta(value)
    return call.slope(value, partial(slope, call)) * call.delta(value)


Derivative: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""σ′ from z and σ(z), which is on the tape."""

DERIVATIVES: dict[str, Derivative] = {
    "abs": lambda z, v: z.sign(),
    "cos": lambda z, v: -torch.sin(z),
    "exp": lambda z, v: v,
    "reciprocal": lambda z, v: -(v * v),
    "relu": lambda z, v: v.sign(),
    "rsqrt": lambda z, v: v * v * v * -0.5,
    "sigmoid": lambda z, v: v * (1 - v),
    "silu": lambda z, v: torch.addcmul(v, torch.sigmoid(z), 1 - v),
    "sin": lambda z, v: torch.cos(z),
    "tanh": lambda z, v: 1 - v * v,
}


SLOPES: dict[str, Slope] = {
    "abs": absolute,
    "cos": cos,
    "erf": erf,
    "exp": exp,
    "gelu": gelu,
    "leaky_relu": leaky_relu,
    "reciprocal": reciprocal,
    "relu": relu,
    "rsqrt": rsqrt,
    "sigmoid": sigmoid,
    "silu": silu,
    "sin": sin,
    "sqrt": root,
    "tanh": tanh,
}
ELEMENTWISE: dict[str, Rule] = {name: partial(elementwise, slope) for name, slope in SLOPES.items()}


# --- Powers and logarithms, whose slopes lose no digits however far apart the two ends lie.


def log_slope(z0: Tensor, z1: Tensor, d: Tensor) -> Tensor:
    """log(z₁/z₀)/d: log1p(d/z₀)/d where the ends are near, and 2 log(√z₁/√z₀)/d, which does not overflow, where they
    are far.
    """
    relative = d / z0
    near = quotient(torch.log1p(relative), relative, 1.0) / z0
    return torch.where(relative.abs() <= 0.5, near, 2 * (z1.sqrt() / z0.sqrt()).log() / d)


def log(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """log(z₁/z₀)/d."""
    return log_slope(z0, z1, z1 - z0)


def log_to(base: float, call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """log(z₁/z₀)/(d log base)."""
    return log_slope(z0, z1, z1 - z0) / ln(base)


def log1p(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """log((1 + z₁)/(1 + z₀))/d."""
    return log_slope(1 + z0, 1 + z1, z1 - z0)


def whole_power(n: int, z0: Tensor, z1: Tensor) -> Tensor:
    """Dₙ = Σ_k z₀ᵏ z₁ⁿ⁻¹⁻ᵏ, by doubling: D₂ₙ = (z₀ⁿ + z₁ⁿ) Dₙ and Dₙ₊₁ = z₁ⁿ + z₀ Dₙ."""
    if n == 1:
        return torch.ones_like(z0)
    half, odd = divmod(n, 2)
    doubled = (z0**half + z1**half) * whole_power(half, z0, z1)
    return z1 ** (n - 1) + z0 * doubled if odd else doubled


def real_power(p: Tensor, z0: Tensor, z1: Tensor) -> Tensor:
    """sign(p) · max(z₀ᵖ, z₁ᵖ) · (1 − exp(−|p log(z₁/z₀)|))/|d| for any power p of positive numbers.

    A number below zero has whole powers alone, and across zero the quotient has all its digits.
    """
    low, high = torch.minimum(z0.abs(), z1.abs()), torch.maximum(z0.abs(), z1.abs())
    d = high - low
    change = -torch.expm1(-(p * d * log_slope(low, high, d)).abs())
    grown = p.sign() * torch.maximum(low**p, high**p) * change / d
    one_side = torch.where(d == 0, p * high ** (p - 1), grown)
    turned = torch.where(z0 < 0, (-torch.ones_like(z0)) ** (p - 1), 1.0)
    across = quotient(z1**p - z0**p, z1 - z0, 0.0)
    still = (p == 0) | (high == 0) & (p < 1)  # at zero a root has no slope, and what does not change needs none
    return torch.where(still, 0.0, torch.where((z0 < 0) == (z1 < 0), turned * one_side, across))


def exponential(base: Tensor, z0: Tensor, z1: Tensor) -> Tensor:
    """log b · max(bᶻ⁰, bᶻ¹) · (1 − exp(−|d log b|))/|d log b|, the slope of z ↦ bᶻ; that is 0 for b = 0 and z > 0."""
    rate = base.log()
    distance = ((z1 - z0) * rate).abs()
    closed = rate * torch.maximum(base**z0, base**z1) * quotient(-torch.expm1(-distance), distance, 1.0)
    return torch.where(base > 0, closed, quotient(base**z1 - base**z0, z1 - z0, 0.0))


def exp2(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """That of 2ᶻ."""
    return exponential(torch.full_like(z0, 2.0), z0, z1)


def power(call: Call, z0: Tensor, z1: Tensor) -> Tensor:
    """That of zᵖ for a number p: Dₙ for whole ones, or by logarithms."""
    p = call.args[1]
    if p == int(p) and p >= 1:
        return whole_power(int(p), z0, z1)
    return real_power(torch.full_like(z0, p), z0, z1)


POWER_SLOPES: dict[str, Slope] = {
    "exp2": exp2,
    "log": log,
    "log10": partial(log_to, 10),
    "log1p": log1p,
    "log2": partial(log_to, 2),
    "pow": power,
}
POWER: dict[str, Rule] = {name: partial(elementwise, slope) for name, slope in POWER_SLOPES.items() if name != "pow"}
