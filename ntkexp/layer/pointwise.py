"""Pointwise layers with elementary kernels: piecewise linear, erf, GELU, sine and cosine."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import cos, factorial, pi

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.covariance.covariance import (
    ROUNDING,
    Covariance,
    Distances,
    PairEnd,
    Signal,
    safe_root,
    unequal_roots,
)
from ntkexp.covariance.pairs import (
    ARC,
    BEND,
    GATE,
    WAVE,
    Operation,
    Operations,
    Pairs,
    require_resolved,
    root_and_inverse,
)
from ntkexp.layer.base import AbstractLayer, says_itself


@dataclass(frozen=True)
class PairMoments:
    """Variances, covariances and distances at both ends of pairs, of one shape."""

    q1: Tensor
    c: Tensor
    q2: Tensor
    distances: Distances


@dataclass(frozen=True)
class NearKernels:
    """κ, κ̇ and the distances after a layer; these are None if they are not known."""

    value: Tensor
    slope: Tensor
    distances: Distances | None


class AbstractPointwise(AbstractLayer):
    """Pointwise layers: z ↦ σ(z), one function applied to every element.

    At infinite width its arguments are Gaussian, and the kernels are expectations over two of them, u and v, with
    variances q₁, q₂ and covariance c:

        K′ = κ(q₁, c, q₂) = E σ(u) σ(v),    Θ′ = Θ · κ̇,   κ̇ = E σ′(u) σ′(v) = ∂κ/∂c.
    """

    @abstractmethod
    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """σ(z)."""

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        """κ and κ̇ of variances and a covariance, each to be broadcast."""
        raise NotImplementedError(type(self).__name__)  # `carry` refuses a layer that has none

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """κ(q, q, q) and κ̇(q, q, q): a variable with itself, by a formula that rounds nothing if there is one."""
        return self.dual(q, q, q)

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> tuple[Tensor, Tensor]:
        """κ and κ̇ at both ends of pairs."""
        return self.dual(first.lay_out(first.variance), c, second.lay_out(second.variance))

    def resolved(self, moments: PairMoments) -> NearKernels:
        """κ and κ̇ from distances, in whose formula no digits of nearly equal or opposite variables cancel."""
        raise NotImplementedError(type(self).__name__)

    @property
    def resolves(self) -> bool:
        """Whether there is such a formula."""
        return says_itself(self, "resolved")

    def carry(self, signal: Signal) -> Signal:
        if type(self).dual is AbstractPointwise.dual:
            return super().carry(signal)
        signal.refuse_unmixed(type(self).__name__)
        return Signal(wide=signal.wide)

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs | None:
        return wanted or Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        met, first, second = covariance.meet()
        pairs, nngp = covariance.pairs, covariance.nngp
        if (
            covariance.ntk is None
        ):  # each example with itself: K′[p, q] = κ, and where p = q by its own formula
            if pairs != Pairs.equal(pairs.pixels):
                nngp, _ = self.between(first, nngp, second)
            return replace(met, nngp=pairs.with_diagonal(nngp, self.alone(first.variance)[0]))
        distances: Distances | None = None
        if covariance.distances is not None and self.resolves:
            zero = torch.zeros_like(nngp)
            q1, q2 = (end.lay_out(end.variance) + zero for end in (first, second))
            near = self.resolved(PairMoments(q1, nngp, q2, covariance.distances.at(q1, q2)))
            nngp, slope, distances = near.value, near.slope, near.distances
        else:
            nngp, slope = self.between(first, nngp, second)  # κ and κ̇
        if covariance.same:
            alone = self.alone(first.variance)
            nngp, slope = (
                covariance.where_same(nngp, alone[0]),
                covariance.where_same(slope, alone[1]),
            )
        return replace(met, nngp=nngp, ntk=covariance.ntk * slope).with_distances(distances)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return Pointwise(self)


class Pointwise(nn.Module):
    """A pointwise layer as a module, which has no weights."""

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
    """σ(z) = a min(z, 0) + b max(z, 0), one bent line.

    With ρ = c/√(q₁q₂), ϑ = arccos ρ, k = (a − b)²/2π, h = (a² + b²)/2 (Cho & Saul 2009):

        κ̇ = h − kϑ,    κ = √(q₁q₂) (k sin ϑ + κ̇ρ),    and κ = hq, κ̇ = h where u = v.

    >>> ReLU().dual(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))
    (tensor(0.5000), tensor(0.5000))
    """

    @property
    @abstractmethod
    def slopes(self) -> tuple[float, float]:
        """a and b."""

    @property
    def constants(self) -> tuple[float, float]:
        a, b = self.slopes
        return (a - b) ** 2 / (2 * pi), (a * a + b * b) / 2

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        k, h = self.constants
        alive = (q1 > 0) & (q2 > 0)
        root = (
            torch.where(q1 > 0, q1, 1.0).sqrt() * torch.where(q2 > 0, q2, 1.0).sqrt()
        )  # q₁q₂ might be no number
        rho = c / root
        # Equal variables are found up to rounding: the arc cosine would make 1e-8 of 1e-16.
        equal = rho.abs() >= 1 - ROUNDING * torch.finfo(rho.dtype).eps
        inner = torch.where(equal, 0.0, rho)
        straight = torch.where(
            rho > 0, torch.zeros_like(rho), pi
        )  # of two numbers it would be one in single precision
        angle = torch.where(equal, straight, inner.acos())
        sine = torch.where(equal, 0.0, ((1 - inner) * (1 + inner)).sqrt())
        slope = h - k * angle
        return torch.where(alive, root, 0.0) * (k * sine + slope * rho), slope

    def resolved(self, moments: PairMoments) -> NearKernels:
        """The same from half angles.

        With R = √(q₁q₂):    sin²(ϑ/2) = near/4R,    cos²(ϑ/2) = far/4R. G = kR(sin ϑ − ϑ cos ϑ) says how bent the line
        is. Beyond π/2 the angle is ϑ′ = π − ϑ, and G that of ϑ′:

            ϑ ≤ π/2:  κ̇ = h − kϑ,    κ = hc + G,    near′ = h near − 2G,              far′ = h far + 2G
            ϑ > π/2:  κ̇ = ab + kϑ′,  κ = abc + G,   near′ = h far − (a + b)²c − 2G,   far′ = h far − (a − b)²c + 2G
        """
        (a, b), (k, h) = self.slopes, self.constants
        distances, c = moments.distances, moments.c
        R = safe_root(moments.q1) * safe_root(moments.q2)
        acute = distances.near <= distances.far
        shorter = torch.where(acute, distances.near, distances.far)
        sine = safe_root(shorter / torch.where(R > 0, 4 * R, 1.0)).clamp_max(0.5**0.5)
        angle = torch.where(
            R > 0, 2 * sine.asin(), pi / 2
        )  # a variable that is zero has a right angle to any other
        G = k * R * sine_gap(angle)
        slope = torch.where(acute, h - k * angle, a * b + k * angle)
        value = torch.where(acute, h * c, a * b * c) + G
        near = torch.where(acute, h * distances.near, h * distances.far - (a + b) ** 2 * c) - 2 * G
        far = h * distances.far + 2 * G - torch.where(acute, 0.0, (a - b) ** 2 * c)
        return NearKernels(
            value, slope, Distances(near, far, h * distances.slack, h * distances.excess)
        )

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        _, h = self.constants
        return h * q, torch.full_like(q, h)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (Operation(BEND, register, constants=self.constants, ends=root_and_inverse),)


GAP_TERMS = 14


def sine_gap(angle: Tensor) -> Tensor:
    """sin ϑ − ϑ cos ϑ for 0 ≤ ϑ ≤ π/2. The two cancel where ϑ is small, so it is Σ (−1)ⁿ⁺¹ 2n ϑ²ⁿ⁺¹/(2n + 1)!."""
    squared, total = angle.square(), torch.zeros_like(angle)
    for n in range(GAP_TERMS, 0, -1):
        total = total * -squared + 2 * n / factorial(2 * n + 1)
    return total * squared * angle


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


# --- Pointwise layers with elementary kernels and no kink. Where u = v they need D² = 1 + 4q (erf) and 1 + 2q (GELU),
# without a difference of squares.


class AbstractEntire(AbstractPointwise):
    """A kernel that depends on differences of variances and covariances, where these are known."""

    @property
    def squared_frequency(self) -> float:
        """Variances are multiplied by this in these differences."""
        return 1.0

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> tuple[Tensor, Tensor]:
        for end in (first, second):
            require_resolved(type(self).__name__, end.variance, self.squared_frequency)
        return super().between(first, c, second)


class Erf(AbstractEntire):
    """σ(z) = 2/√π ∫₀ᶻ exp(−t²) dt.

    D = √((1 + 2q₁)(1 + 2q₂) − 4c²),    κ = (2/π) atan2(2c, D),    κ̇ = (4/π)/D    (Williams 1997)
    """

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.erf(z)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        D = ((1 + 2 * q1) * (1 + 2 * q2) - 4 * c * c).sqrt()
        return 2 / pi * torch.atan2(2 * c, D), 4 / pi / D

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        D = (1 + 4 * q).sqrt()
        return 2 / pi * torch.atan2(2 * q, D), 4 / pi / D

    def resolved(self, moments: PairMoments) -> NearKernels:
        """The same from distances. With P = 1 + 2q and the angles ψ that are missing to a right one, κ = 1 − 2ψ/π:

        2 sin²(ψ/2) = g/√(P₁P₂),  g = 1 + E(u − v)² − (√P₁ − √P₂)²/2,    D² = g times the same with E(u + v)²
        """
        A, B = (1 + 2 * moments.q1).sqrt(), (1 + 2 * moments.q2).sqrt()
        distances = moments.distances
        uneven = 2 * distances.excess / (A + B)
        rests = [
            squared - uneven.square() / 2 for squared in (distances.of_difference, distances.of_sum)
        ]
        D = ((1 + rests[0]) * (1 + rests[1])).sqrt()
        # The shorter distance, (2/π)(2ψ₁₂ − ψ₁₁ − ψ₂₂), by sin ½(ψ₁₂ − ψ₁₁) = (sin²½ψ₁₂ − sin²½ψ₁₁)/sin ½(ψ₁₂ + ψ₁₁).
        # Both together are 2(κ₁₁ + κ₂₂)
        close = rests[0] <= rests[1]
        rest = torch.minimum(*rests)
        halves = [(0.5**0.5 / root).asin() for root in (A, B)]
        half = ((1 + rest) / (2 * A * B)).sqrt().asin()
        short = torch.zeros_like(rest)
        for own, share in zip(halves, (uneven / A, -uneven / B), strict=True):
            short = short + 4 / pi * ((rest + share) / (2 * A * B) / (half + own).sin()).asin()
        q1, q2 = (1 - 4 / pi * own for own in halves)
        excess = (
            4 / pi * (distances.excess / (A * B).square() / (halves[0] + halves[1]).sin()).asin()
        )
        unequal = unequal_roots(q1, q2, excess)
        near, far = short - unequal, 2 * (q1 + q2) - short - unequal
        after = Distances(
            torch.where(close, near, far), torch.where(close, far, near), unequal, excess
        )
        return NearKernels(2 / pi * torch.atan2(2 * moments.c, D), 4 / pi / D, after)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (
            Operation(
                ARC, register, ends=lambda q: ((1 + 2 * require_resolved("Erf", q)).rsqrt(),)
            ),
        )


class GELU(AbstractEntire):
    """σ(z) = z Φ(z), Φ the distribution function of the normal law.

    P = (1 + q₁)(1 + q₂),  D² = P − c²,  φ = ¼ + atan2(c, D)/2π,                     (Tsuchida 2020)
    κ = (c² + q₁q₂D²)/(2πPD) + cφ,    κ̇ = c/(2πD) · (1/D² + (1 − q₁q₂)/P + 1) + φ
    """

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.gelu(z)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return self.by_parts(q1, c, q2, (1 + q1) * (1 + q2) - c * c)

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.by_parts(q, q, q, 1 + 2 * q)

    def resolved(self, moments: PairMoments) -> NearKernels:
        """The same with D² = 1 + q₁ + q₂ + near · far/4."""
        D2 = 1 + moments.q1 + moments.q2 + moments.distances.near * moments.distances.far / 4
        return NearKernels(*self.by_parts(moments.q1, moments.c, moments.q2, D2), None)

    @staticmethod
    def by_parts(q1: Tensor, c: Tensor, q2: Tensor, D2: Tensor) -> tuple[Tensor, Tensor]:
        """κ and κ̇ from variances, c and D²; 1 + (1 − q₁q₂)/P = (2 + q₁ + q₂)/P, and φ = atan2(D, −c)/2π."""
        D, P, squared = D2.sqrt(), (1 + q1) * (1 + q2), q1 * q2
        phi = torch.atan2(D, -c) / (2 * pi)
        value = (c * c + squared * D2) / (2 * pi * P * D) + c * phi
        return value, c / (2 * pi * D) * (1 / D2 + (2 + q1 + q2) / P) + phi

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (
            Operation(
                GATE, register, ends=lambda q: ((1 + require_resolved("GELU", q)).rsqrt(), q)
            ),
        )


class AbstractWave(AbstractEntire):
    """A sine a sin(bz + c₀), of frequency b/2π.

    e₋ = exp(b²(c − (q₁ + q₂)/2)),  e₊ = exp(−b²(c + (q₁ + q₂)/2)) cos 2c₀,
    κ = a²/2 (e₋ − e₊),    κ̇ = a²b²/2 (e₋ + e₊)
    """

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    @abstractmethod
    def phase(self) -> float:
        """cos 2c₀."""

    @property
    def squared_frequency(self) -> float:
        return self.b**2

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        a, b, mean = self.a, self.b, (q1 + q2) / 2
        near, far = torch.exp(b * b * (c - mean)), torch.exp(-b * b * (c + mean)) * self.phase
        return a * a / 2 * (near - far), a * a * b * b / 2 * (near + far)

    def resolved(self, moments: PairMoments) -> NearKernels:
        """The same with e₋ = exp(−b² E(u − v)²/2) and e₊ = exp(−b² E(u + v)²/2) cos 2c₀."""
        a, squared, phase = self.a, self.squared_frequency, self.phase
        both = moments.distances.of_difference, moments.distances.of_sum
        near, far = (torch.exp(-squared * distance / 2) for distance in both)
        value, slope = a * a / 2 * (near - far * phase), a * a * squared / 2 * (near + far * phase)
        return NearKernels(value, slope, None)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        name, squared = type(self).__name__, self.b**2
        constants = (self.a**2 / 2, squared, self.phase)
        return (
            Operation(
                WAVE,
                register,
                constants=constants,
                ends=lambda q: (squared / 2 * require_resolved(name, q, squared),),
            ),
        )


class Sin(AbstractWave):
    """σ(z) = a sin(bz + c)."""

    @property
    def phase(self) -> float:
        return cos(2 * self.c)

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.a * torch.sin(self.b * z + self.c)


class Cos(AbstractWave):
    """σ(z) = a cos(bz + c)."""

    @property
    def phase(self) -> float:
        return -cos(2 * self.c)

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.a * torch.cos(self.b * z + self.c)
