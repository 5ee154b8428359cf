"""Powers and logarithms, whose slopes lose no digits however far apart the two ends lie. With d = z₁ − z₀:

log      log1p(d/z₀)/d where the ends are near, 2 log(√z₁/√z₀)/d where they are far: nothing cancels or overflows
zᵖ       sign(p) · m · (1 − exp(−|p log(z₁/z₀)|))/|d|,  m the larger power
zⁿ       D₂ₙ = (z₀ⁿ + z₁ⁿ) Dₙ and Dₙ₊₁ = z₁ⁿ + z₀ Dₙ,  for whole n ≥ 1
bᶻ       log b · m · (1 − exp(−|d log b|))/|d log b|
"""

from __future__ import annotations

from functools import partial
from math import log as ln

import torch
from torch import Tensor

from ntkexp.kernel.secant.rules.base import AbstractCall, Rule, Slope
from ntkexp.kernel.secant.rules.elementwise import elementwise, quotient


def log_slope(z0: Tensor, z1: Tensor, d: Tensor) -> Tensor:
    """log(z₁/z₀)/d."""
    relative = d / z0
    near = quotient(torch.log1p(relative), relative, 1.0) / z0
    return torch.where(relative.abs() <= 0.5, near, 2 * (z1.sqrt() / z0.sqrt()).log() / d)


def log(call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    return log_slope(z0, z1, z1 - z0)


def log_to(base: float, call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    return log_slope(z0, z1, z1 - z0) / ln(base)


def log1p(call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    return log_slope(1 + z0, 1 + z1, z1 - z0)


def whole_power(n: int, z0: Tensor, z1: Tensor) -> Tensor:
    """Σ_k z₀ᵏ z₁ⁿ⁻¹⁻ᵏ, by doubling."""
    if n == 1:
        return torch.ones_like(z0)
    half, odd = divmod(n, 2)
    doubled = (z0**half + z1**half) * whole_power(half, z0, z1)
    return z1 ** (n - 1) + z0 * doubled if odd else doubled


def real_power(p: Tensor, z0: Tensor, z1: Tensor) -> Tensor:
    """The slope of any power; a number below zero has whole ones alone, and across zero the quotient has all its
    digits.
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
    """The slope of b ↦ bᶻ, which is 0 for b = 0 and z > 0."""
    rate = base.log()
    distance = ((z1 - z0) * rate).abs()
    closed = rate * torch.maximum(base**z0, base**z1) * quotient(-torch.expm1(-distance), distance, 1.0)
    return torch.where(base > 0, closed, quotient(base**z1 - base**z0, z1 - z0, 0.0))


def exp2(call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    return exponential(torch.full_like(z0, 2.0), z0, z1)


def power(call: AbstractCall, z0: Tensor, z1: Tensor) -> Tensor:
    """zᵖ for a number p."""
    p = call.args[1]
    if p == int(p) and p >= 1:
        return whole_power(int(p), z0, z1)
    return real_power(torch.full_like(z0, p), z0, z1)


SLOPES: dict[str, Slope] = {
    "exp2": exp2,
    "log": log,
    "log10": partial(log_to, 10),
    "log1p": log1p,
    "log2": partial(log_to, 2),
    "pow": power,
}
RULES: dict[str, Rule] = {name: partial(elementwise, slope) for name, slope in SLOPES.items() if name != "pow"}
