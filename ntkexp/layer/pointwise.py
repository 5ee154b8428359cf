"""Pointwise layers: one function σ applied to every element.

At infinite width its arguments are Gaussian, and the kernels are expectations over two of them, u and v, with variances
q₁, q₂ and covariance c:

    K′ = κ(q₁, c, q₂) = E σ(u) σ(v),    Θ′ = Θ · κ̇,   κ̇ = E σ′(u) σ′(v) = ∂κ/∂c.

For one bent line, σ(z) = a min(z, 0) + b max(z, 0), with ρ = c/√(q₁q₂), ϑ = arccos ρ, k = (a − b)²/2π, h = (a² + b²)/2
(Cho & Saul 2009):

    κ̇ = h − kϑ,    κ = √(q₁q₂) (k sin ϑ + κ̇ρ),    and κ = hq, κ̇ = h where u = v.

>>> ReLU().dual(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))
(tensor(0.5000), tensor(0.5000))
"""

from __future__ import annotations

from abc import abstractmethod
from math import pi

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.covariance.covariance import Covariance, PairEnd
from ntkexp.covariance.operation import Operations, bend
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
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
    """A pointwise layer is a module without weights."""

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
