"""Pointwise layers with elementary kernels: piecewise linear, erf, GELU, sine and cosine."""

from __future__ import annotations

from abc import abstractmethod
from math import cos, pi

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.covariance.covariance import Covariance, PairEnd, Signal
from ntkexp.covariance.pairs import Operations, Pairs, arc, bend, gate, resolved, wave
from ntkexp.layer.base import AbstractLayer

ROUNDING = 16
"""Correlations within so many units of rounding of one count as one."""


class AbstractPointwise(AbstractLayer):
    """z ↦ σ(z), element by element."""

    @abstractmethod
    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """σ(z)."""

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        """κ and κ̇ of variances and a covariance, each to be broadcast."""
        raise NotImplementedError(type(self).__name__)  # `carry` refuses a layer that has none

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """κ(q, q, q) and κ̇(q, q, q): a variable with itself."""
        return self.dual(q, q, q)

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> tuple[Tensor, Tensor]:
        """κ and κ̇ at both ends of pairs."""
        return self.dual(first.lay_out(first.variance), c, second.lay_out(second.variance))

    def carry(self, signal: Signal) -> Signal:
        if type(self).dual is AbstractPointwise.dual:
            return super().carry(signal)
        return signal.after_nonlinearity(type(self).__name__)

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        return wanted or Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance.pointwise(self.between, self.alone)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return Pointwise(self)


class Pointwise(nn.Module):
    """Pointwise layers: one function σ applied to every element.

    A pointwise layer is a module without weights.

    At infinite width its arguments are Gaussian, and the kernels are expectations over two of them, u and v, with
    variances q₁, q₂ and covariance c:

        K′ = κ(q₁, c, q₂) = E σ(u) σ(v),    Θ′ = Θ · κ̇,   κ̇ = E σ′(u) σ′(v) = ∂κ/∂c.

    For one bent line, σ(z) = a min(z, 0) + b max(z, 0), with ρ = c/√(q₁q₂), ϑ = arccos ρ, k = (a − b)²/2π, h = (a²
    + b²)/2 (Cho & Saul 2009):

        κ̇ = h − kϑ,    κ = √(q₁q₂) (k sin ϑ + κ̇ρ),    and κ = hq, κ̇ = h where u = v.

    >>> ReLU().dual(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))
    (tensor(0.5000), tensor(0.5000))
    """

    def __init__(self, layer: AbstractPointwise) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.layer.apply(z)


class Linear(AbstractPointwise):
    """σ(z) = z."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return z

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return c, torch.ones_like(c)

    def carry(self, signal: Signal) -> Signal:
        return signal

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        return wanted

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return ()


class AbstractBent(AbstractPointwise):
    """σ(z) = a min(z, 0) + b max(z, 0)."""

    @property
    @abstractmethod
    def slopes(self) -> tuple[float, float]:
        """a and b."""

    @property
    def constants(self) -> tuple[float, float]:
        """k and h."""
        a, b = self.slopes
        return (a - b) ** 2 / (2 * pi), (a * a + b * b) / 2

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        k, h = self.constants
        alive = (q1 > 0) & (q2 > 0)
        root = torch.where(q1 > 0, q1, 1.0).sqrt() * torch.where(q2 > 0, q2, 1.0).sqrt()  # q₁q₂ might be no number
        rho = c / root
        # Equal variables are found up to rounding: the arc cosine would make 1e-8 of 1e-16.
        equal = rho.abs() >= 1 - ROUNDING * torch.finfo(rho.dtype).eps
        inner = torch.where(equal, 0.0, rho)
        straight = torch.where(rho > 0, torch.zeros_like(rho), pi)  # of two numbers it would be one in single precision
        angle = torch.where(equal, straight, inner.acos())
        sine = torch.where(equal, 0.0, ((1 - inner) * (1 + inner)).sqrt())
        slope = h - k * angle
        return torch.where(alive, root, 0.0) * (k * sine + slope * rho), slope

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        _, h = self.constants
        return h * q, torch.full_like(q, h)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (bend(register, *self.constants),)


class ReLU(AbstractBent):
    """σ(z) = max(0, z)."""

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 1.0

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.relu(z)


class LeakyReLU(AbstractBent):
    """σ(z) = max(0, z) + slope · min(0, z)."""

    slope: float = 0.1

    @property
    def slopes(self) -> tuple[float, float]:
        return self.slope, 1.0

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.leaky_relu(z, self.slope)


class Abs(AbstractBent):
    """σ(z) = |z|."""

    @property
    def slopes(self) -> tuple[float, float]:
        return -1.0, 1.0

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.abs(z)


# --- Pointwise layers with elementary kernels and no kink: erf, GELU, sine and cosine.
#
#     erf    D = √((1 + 2q₁)(1 + 2q₂) − 4c²),  κ = (2/π) atan2(2c, D),  κ̇ = (4/π)/D                   (Williams 1997)
#     GELU   P = (1 + q₁)(1 + q₂),  D² = P − c²,  φ = ¼ + atan2(c, D)/2π,
#            κ = (c² + q₁q₂D²)/(2πPD) + cφ,  κ̇ = c/(2πD) · (1/D² + (1 − q₁q₂)/P + 1) + φ              (Tsuchida 2020)
#     sine   e₋ = exp(b²(c − (q₁ + q₂)/2)),  e₊ = exp(−b²(c + (q₁ + q₂)/2)) cos 2c₀   for σ = a sin(bz + c₀),
#            κ = a²/2 (e₋ − e₊),  κ̇ = a²b²/2 (e₋ + e₊)
#
# Where u = v they need D² = 1 + 4q and D² = 1 + 2q, without a difference of squares.


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
