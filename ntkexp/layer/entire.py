"""Pointwise layers with elementary kernels and no kink: erf, GELU, sine and cosine.

    erf    D = √((1 + 2q₁)(1 + 2q₂) − 4c²),  κ = (2/π) atan2(2c, D),  κ̇ = (4/π)/D                   (Williams 1997)
    GELU   P = (1 + q₁)(1 + q₂),  D² = P − c²,  φ = ¼ + atan2(c, D)/2π,
           κ = (c² + q₁q₂D²)/(2πPD) + cφ,  κ̇ = c/(2πD) · (1/D² + (1 − q₁q₂)/P + 1) + φ              (Tsuchida 2020)
    sine   e₋ = exp(b²(c − (q₁ + q₂)/2)),  e₊ = exp(−b²(c + (q₁ + q₂)/2)) cos 2c₀   for σ = a sin(bz + c₀),
           κ = a²/2 (e₋ − e₊),  κ̇ = a²b²/2 (e₋ + e₊)

Where u = v they need D² = 1 + 4q and D² = 1 + 2q, without a difference of squares.
"""

from __future__ import annotations

from math import cos, pi

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.covariance import PairEnd
from ntkexp.covariance.operation import Operations, arc, gate, wave
from ntkexp.covariance.resolution import resolved
from ntkexp.layer.pointwise import AbstractPointwise


class AbstractEntire(AbstractPointwise):
    """A kernel that depends on differences of variances and covariances, where these can be told."""

    @property
    def squared_frequency(self) -> float:
        """Variances are multiplied by this in these differences."""
        return 1.0

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> tuple[Tensor, Tensor]:
        for end in (first, second):
            resolved(type(self).__name__, end.variance, self.squared_frequency)
        return super().between(first, c, second)


class AbstractWave(AbstractEntire):
    """A function of frequency b/2π."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    def squared_frequency(self) -> float:
        return self.b**2


class Erf(AbstractEntire):
    """σ(z) = 2/√π ∫₀ᶻ exp(−t²) dt."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.erf(z)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return by_angle(c, ((1 + 2 * q1) * (1 + 2 * q2) - 4 * c * c).sqrt())

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return by_angle(q, (1 + 4 * q).sqrt())

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (arc(register),)


def by_angle(c: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """κ and κ̇ of erf from c and D."""
    return 2 / pi * torch.atan2(2 * c, root), 4 / pi / root


class GELU(AbstractEntire):
    """σ(z) = z Φ(z), Φ the distribution function of the normal law."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.gelu(z)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        whole = (1 + q1) * (1 + q2)
        return gaussian_gate(q1 * q2, c, whole, whole - c * c)

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return gaussian_gate(q * q, q, (1 + q) ** 2, 1 + 2 * q)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (gate(register),)


def gaussian_gate(squared: Tensor, c: Tensor, whole: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """κ and κ̇ of GELU from q₁q₂, c, P and D²."""
    root = rest.sqrt()
    share = 0.25 + torch.atan2(c, root) / (2 * pi)
    value = (c * c + squared * rest) / (2 * pi * whole * root) + c * share
    return value, c / (2 * pi * root) * (1 / rest + (1 - squared) / whole + 1) + share


class Sin(AbstractWave):
    """σ(z) = a sin(bz + c)."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.a * torch.sin(self.b * z + self.c)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return waves(self.a, self.b, cos(2 * self.c), c, (q1 + q2) / 2)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (wave(register, type(self).__name__, self.a, self.b, cos(2 * self.c)),)


class Cos(AbstractWave):
    """σ(z) = a cos(bz + c)."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.a * torch.cos(self.b * z + self.c)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return waves(self.a, self.b, -cos(2 * self.c), c, (q1 + q2) / 2)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (wave(register, type(self).__name__, self.a, self.b, -cos(2 * self.c)),)


def waves(a: float, b: float, phase: float, c: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """κ and κ̇ of a wave from its phase's cos 2c₀, c and the mean of the variances."""
    near, far = torch.exp(b * b * (c - mean)), torch.exp(-b * b * (c + mean)) * phase
    return a * a / 2 * (near - far), a * a * b * b / 2 * (near + far)
