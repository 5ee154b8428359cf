"""Pointwise layers with closed-form kernels: piecewise linear, erf, GELU,
sine and cosine."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import cos, factorial, pi
from typing import NamedTuple, TypeAlias

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
from ntkexp.layer.base import AbstractLayer, defines_itself
from ntkexp.mistake import Mistake
from ntkexp.shapes import Shape

Values: TypeAlias = Float[Tensor, "..."]
"""Values of any shape. An activation acts on each of them."""


ValueAndSlope: TypeAlias = tuple[Tensor, Tensor]
"""The kernels κ and κ̇ (see `AbstractPointwise`)."""


@dataclass(frozen=True)
class PairMoments:
    """Moments of the preactivations u and v of each pair: the variances q₁, q₂, the
    covariance c, and the distances. All tensors have one shape."""

    q1: Tensor
    c: Tensor
    q2: Tensor
    distances: Distances


class NearKernels(NamedTuple):
    """The kernels κ and κ̇ (see `AbstractPointwise`) and the distances after a layer.
    The distances are None if the layer has no formula for them."""

    value: Tensor
    slope: Tensor
    distances: Distances | None


class AbstractPointwise(AbstractLayer):
    """Pointwise layers: z ↦ σ(z), one function applied to every element.

    At infinite width, preactivations are Gaussian. The kernels are expectations over
    two preactivations u and v with variances q₁ and q₂ and covariance c:

        K′ = κ(q₁, c, q₂) = E σ(u) σ(v)
        Θ′ = Θ · κ̇,    κ̇ = E σ′(u) σ′(v) = ∂κ/∂c
    """

    @abstractmethod
    def apply(self, z: Values) -> Values:
        """Return σ(z)."""

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:
        """Return κ = E σ(u) σ(v) and κ̇ = E σ′(u) σ′(v).
        The arguments are broadcast."""
        # not reached, because `carry` raises for such layers
        raise NotImplementedError(type(self).__name__)

    def alone(self, q: Tensor) -> ValueAndSlope:
        """Return κ = E σ(u)² and κ̇ = E σ′(u)² for a preactivation u of variance q.
        Subclasses use formulas without cancellation if possible."""
        return self.dual(q, q, q)

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> ValueAndSlope:
        """Return κ and κ̇ of each pair of pixels. The arguments are the variances at
        both pixels, and the covariance c."""
        q1 = first.broadcast(first.variance)
        q2 = second.broadcast(second.variance)
        return self.dual(q1, c, q2)

    def resolved(self, moments: PairMoments) -> NearKernels:
        """Return κ and κ̇, computed from distances. The result is accurate even if the
        preactivations u and v are nearly equal or opposite."""
        # not reached, because callers ask `resolves` first
        raise NotImplementedError(type(self).__name__)

    @property
    def resolves(self) -> bool:
        """True if the layer implements `resolved`."""
        return defines_itself(self, "resolved")

    def carry(self, signal: Signal) -> Signal:
        if type(self).dual is AbstractPointwise.dual:
            return super().carry(signal)
        signal.refuse_unmixed(type(self).__name__)
        return Signal(wide=signal.wide)

    def input_self_pairs(
        self, output_pairs: Pairs | None, shape: Shape
    ) -> Pairs | None:
        return output_pairs or Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        entered, first, second = covariance.enter_nonlinear()
        pairs = covariance.pairs
        nngp = covariance.nngp
        if covariance.ntk is None:
            # K between each example and itself: for equal pixels, use `alone`.
            if pairs != Pairs.equal(pairs.pixels):
                nngp, _ = self.between(first, nngp, second)
            variance, _ = self.alone(first.variance)
            return replace(entered, nngp=pairs.with_diagonal(nngp, variance))

        # κ and κ̇ between left and right examples
        distances: Distances | None = None
        if covariance.distances is not None and self.resolves:
            zero = torch.zeros_like(nngp)
            q1 = first.broadcast(first.variance) + zero
            q2 = second.broadcast(second.variance) + zero
            moments = PairMoments(q1, nngp, q2, covariance.distances.at(q1, q2))
            nngp, slope, distances = self.resolved(moments)
        else:
            nngp, slope = self.between(first, nngp, second)
        if covariance.same:
            value_alone, slope_alone = self.alone(first.variance)
            nngp = covariance.replace_self_pairs(nngp, value_alone)
            slope = covariance.replace_self_pairs(slope, slope_alone)
        after = replace(entered, nngp=nngp, ntk=covariance.ntk * slope)
        return after.with_distances(distances)

    def shape(self, shape: Shape) -> Shape:
        return shape

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        return Pointwise(self)


class Pointwise(nn.Module):
    """A pointwise layer as a module without weights."""

    def __init__(self, layer: AbstractPointwise) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Values) -> Values:
        activations = self.layer.apply(z)
        if activations.shape != z.shape or activations.dtype != z.dtype:
            raise Mistake(
                f"the activation {self.layer.option} returns {activations.dtype} of shape "
                f"{list(activations.shape)} for {z.dtype} of shape {list(z.shape)}; return a "
                "number of this type for each element"
            )
        return activations


class Linear(AbstractPointwise):
    """σ(z) = z."""

    def apply(self, z: Values) -> Values:
        return z

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:
        return c, torch.ones_like(c)

    def carry(self, signal: Signal) -> Signal:
        return signal

    def input_self_pairs(
        self, output_pairs: Pairs | None, shape: Shape
    ) -> Pairs | None:
        return output_pairs

    def push(self, covariance: Covariance, shape: Shape) -> Covariance:
        return covariance

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        return ()


class AbstractBent(AbstractPointwise):
    """A piecewise-linear activation, σ(z) = a min(z, 0) + b max(z, 0).

    With ρ = c/√(q₁q₂), ϑ = arccos ρ, k = (a − b)²/2π
    and h = (a² + b²)/2 (Cho & Saul 2009),

        κ̇ = h − kϑ,    κ = √(q₁q₂) (k sin ϑ + κ̇ρ).

    If u = v, κ = hq and κ̇ = h.

    >>> ReLU().dual(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))
    (tensor(0.5000), tensor(0.5000))
    """

    @property
    @abstractmethod
    def slopes(self) -> tuple[float, float]:
        """The slopes a for z < 0 and b for z > 0."""

    @property
    def constants(self) -> tuple[float, float]:
        """The constants k = (a − b)²/2π and h = (a² + b²)/2."""
        a, b = self.slopes
        return (a - b) ** 2 / (2 * pi), (a * a + b * b) / 2

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:
        k, h = self.constants
        # Compute √q₁√q₂, because q₁q₂ may overflow.
        root1 = torch.where(q1 > 0, q1, 1.0).sqrt()
        root2 = torch.where(q2 > 0, q2, 1.0).sqrt()
        root = root1 * root2
        rho = c / root
        # If |ρ| is 1 up to rounding, set |ρ| = 1:
        # the arc cosine would turn an error of 1e-16 into 1e-8.
        equal = rho.abs() >= 1 - ROUNDING * torch.finfo(rho.dtype).eps
        inner = torch.where(equal, 0.0, rho)
        # `zeros_like`, because `where` of two numbers would round π
        # to single precision.
        straight = torch.where(rho > 0, torch.zeros_like(rho), pi)
        angle = torch.where(equal, straight, inner.acos())
        sine = torch.where(equal, 0.0, ((1 - inner) * (1 + inner)).sqrt())
        slope = h - k * angle
        nonzero_root = torch.where((q1 > 0) & (q2 > 0), root, 0.0)
        return nonzero_root * (k * sine + slope * rho), slope

    def resolved(self, moments: PairMoments) -> NearKernels:
        """Return κ, κ̇ and the distances after the layer, computed from half angles.

        The docstring of the class defines a, b, h, k and ϑ; `Distances` defines near
        and far. Let R = √(q₁q₂). Then sin²(ϑ/2) = near/4R and cos²(ϑ/2) = far/4R. Let
        G = kR(sin ϑ − ϑ cos ϑ). If ϑ > π/2, use ϑ′ = π − ϑ instead of ϑ, also in G. A
        prime at near and far marks the distances after the layer:

            ϑ ≤ π/2:  κ̇ = h − kϑ,    κ = hc + G,    near′ = h near − 2G,              far′ = h far + 2G
            ϑ > π/2:  κ̇ = ab + kϑ′,  κ = abc + G,   near′ = h far − (a + b)²c − 2G,   far′ = h far − (a − b)²c + 2G
        """
        a, b = self.slopes
        k, h = self.constants
        near, far, slack, excess = moments.distances
        c = moments.c
        R = safe_root(moments.q1) * safe_root(moments.q2)

        # ϑ or ϑ′, by the sine of its half
        acute = near <= far
        squared_sine = torch.where(acute, near, far) / torch.where(R > 0, 4 * R, 1.0)
        sine = safe_root(squared_sine).clamp_max(0.5**0.5)
        # a right angle if u or v is zero
        angle = torch.where(R > 0, 2 * sine.asin(), pi / 2)
        G = k * R * sine_gap(angle)

        slope = torch.where(acute, h - k * angle, a * b + k * angle)
        value = torch.where(acute, h * c, a * b * c) + G
        near = torch.where(acute, h * near, h * far - (a + b) ** 2 * c) - 2 * G
        far = h * far + 2 * G - torch.where(acute, 0.0, (a - b) ** 2 * c)
        return NearKernels(value, slope, Distances(near, far, h * slack, h * excess))

    def alone(self, q: Tensor) -> ValueAndSlope:
        _, h = self.constants
        return h * q, torch.full_like(q, h)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        return (
            Operation(
                BEND, register, constants=self.constants, fields_of=root_and_inverse
            ),
        )


GAP_TERMS = 14


def sine_gap(angle: Tensor) -> Tensor:
    """Return sin ϑ − ϑ cos ϑ = Σ (−1)ⁿ⁺¹ 2n ϑ²ⁿ⁺¹/(2n + 1)! for 0 ≤ ϑ ≤ π/2.

    The series avoids the cancellation of the two terms for small ϑ.
    """
    squared = angle.square()
    total = torch.zeros_like(angle)
    for n in range(GAP_TERMS, 0, -1):
        total = total * -squared + 2 * n / factorial(2 * n + 1)
    return total * squared * angle


class ReLU(AbstractBent):
    """σ(z) = max(0, z)."""

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 1.0

    def apply(self, z: Values) -> Values:
        return torch.relu(z)


class LeakyReLU(AbstractBent):
    """σ(z) = max(0, z) + slope · min(0, z)."""

    slope: float = 0.1

    @property
    def slopes(self) -> tuple[float, float]:
        return self.slope, 1.0

    def apply(self, z: Values) -> Values:
        return torch.nn.functional.leaky_relu(z, self.slope)


class Abs(AbstractBent):
    """σ(z) = |z|."""

    @property
    def slopes(self) -> tuple[float, float]:
        return -1.0, 1.0

    def apply(self, z: Values) -> Values:
        return torch.abs(z)


# --- Smooth activations with closed-form kernels
#
# The formulas contain a quantity D, whose square is a difference of squares. If u = v,
# D² is 1 + 4q (erf) or 1 + 2q (GELU), without a difference.


class AbstractEntire(AbstractPointwise):
    """A smooth activation whose kernel depends on the difference q₁q₂ − c²
    or (q₁ + q₂)/2 − c.

    This difference cancels if the variances are large.
    `between` raises if too few digits remain."""

    @property
    def squared_frequency(self) -> float:
        """b², the factor by which the activation scales variances."""
        return 1.0

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> ValueAndSlope:
        for end in (first, second):
            require_resolved(type(self).__name__, end.variance, self.squared_frequency)
        return super().between(first, c, second)


class Erf(AbstractEntire):
    """σ(z) = 2/√π ∫₀ᶻ exp(−t²) dt.

    D = √((1 + 2q₁)(1 + 2q₂) − 4c²),    κ = (2/π) atan2(2c, D),    κ̇ = (4/π)/D    (Williams 1997)
    """

    def apply(self, z: Values) -> Values:
        return torch.erf(z)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:
        D = ((1 + 2 * q1) * (1 + 2 * q2) - 4 * c * c).sqrt()
        return 2 / pi * torch.atan2(2 * c, D), 4 / pi / D

    def alone(self, q: Tensor) -> ValueAndSlope:
        D = (1 + 4 * q).sqrt()
        return 2 / pi * torch.atan2(2 * q, D), 4 / pi / D

    def resolved(self, moments: PairMoments) -> NearKernels:
        """Return κ, κ̇ and the distances after the layer.

        Let P = 1 + 2q, and define ψ by κ = 1 − 2ψ/π. Then

            2 sin²(ψ/2) = g/√(P₁P₂),    g = 1 + E(u − v)² − (√P₁ − √P₂)²/2.

        With D as in the docstring of the class, D² = g g₊, where g₊ is g with E(u + v)²
        in place of E(u − v)²."""
        A = (1 + 2 * moments.q1).sqrt()  # √P₁
        B = (1 + 2 * moments.q2).sqrt()  # √P₂
        distances = moments.distances
        # g − 1 for the difference and for the sum
        root_gap = 2 * distances.excess / (A + B)  # √P₁ − √P₂
        rest_of_difference = distances.of_difference - root_gap.square() / 2
        rest_of_sum = distances.of_sum - root_gap.square() / 2
        D = ((1 + rest_of_difference) * (1 + rest_of_sum)).sqrt()
        # The smaller of E(u′ − v′)² and E(u′ + v′)² is (2/π)(2ψ₁₂ − ψ₁₁ − ψ₂₂). Compute
        # the differences of these angles without cancellation, from
        #     sin ½(ψ₁₂ − ψ₁₁) = (sin²½ψ₁₂ − sin²½ψ₁₁)/sin ½(ψ₁₂ + ψ₁₁)
        is_near = rest_of_difference <= rest_of_sum
        rest = torch.minimum(rest_of_difference, rest_of_sum)
        half1 = (0.5**0.5 / A).asin()  # ½ψ₁₁
        half2 = (0.5**0.5 / B).asin()  # ½ψ₂₂
        half = ((1 + rest) / (2 * A * B)).sqrt().asin()  # ½ψ₁₂
        shorter = torch.zeros_like(rest)
        for half_alone, share in ((half1, root_gap / A), (half2, -root_gap / B)):
            sine = (rest + share) / (2 * A * B) / (half + half_alone).sin()
            shorter = shorter + 4 / pi * sine.asin()
        # Variances after the layer. E(u′ − v′)² + E(u′ + v′)² = 2(κ₁₁ + κ₂₂).
        q1 = 1 - 4 / pi * half1
        q2 = 1 - 4 / pi * half2
        excess = (
            4
            / pi
            * (distances.excess / (A * B).square() / (half1 + half2).sin()).asin()
        )
        slack = unequal_roots(q1, q2, excess)
        short = shorter - slack
        long = 2 * (q1 + q2) - shorter - slack
        near = torch.where(is_near, short, long)
        far = torch.where(is_near, long, short)
        after = Distances(near, far, slack, excess)
        return NearKernels(2 / pi * torch.atan2(2 * moments.c, D), 4 / pi / D, after)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        def fields_of(q: Tensor) -> tuple[Tensor]:
            return ((1 + 2 * require_resolved("Erf", q)).rsqrt(),)

        return (Operation(ARC, register, fields_of=fields_of),)


class GELU(AbstractEntire):
    """σ(z) = z Φ(z), with the distribution function Φ of N(0, 1).

    P = (1 + q₁)(1 + q₂),  D² = P − c²,  φ = ¼ + atan2(c, D)/2π,                     (Tsuchida 2020)
    κ = (c² + q₁q₂D²)/(2πPD) + cφ,    κ̇ = c/(2πD) · (1/D² + (1 − q₁q₂)/P + 1) + φ
    """

    def apply(self, z: Values) -> Values:
        return torch.nn.functional.gelu(z)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:
        return self.by_parts(q1, c, q2, (1 + q1) * (1 + q2) - c * c)

    def alone(self, q: Tensor) -> ValueAndSlope:
        return self.by_parts(q, q, q, 1 + 2 * q)

    def resolved(self, moments: PairMoments) -> NearKernels:
        """Return κ and κ̇ by the formulas of the class. D² = (1 + q₁)(1 + q₂) − c² is
        computed as 1 + q₁ + q₂ + near · far/4, from the distances near = 2√(q₁q₂) − 2c
        and far = 2√(q₁q₂) + 2c, without cancellation."""
        q1 = moments.q1
        q2 = moments.q2
        D2 = 1 + q1 + q2 + moments.distances.near * moments.distances.far / 4
        value, slope = self.by_parts(q1, moments.c, q2, D2)
        return NearKernels(value, slope, None)

    @staticmethod
    def by_parts(q1: Tensor, c: Tensor, q2: Tensor, D2: Tensor) -> ValueAndSlope:
        """Return κ and κ̇ by the formulas of the class, given D². Without cancellation,
        1 + (1 − q₁q₂)/P = (2 + q₁ + q₂)/P and φ = atan2(D, −c)/2π."""
        D = D2.sqrt()
        P = (1 + q1) * (1 + q2)
        phi = torch.atan2(D, -c) / (2 * pi)
        value = (c * c + q1 * q2 * D2) / (2 * pi * P * D) + c * phi
        slope = c / (2 * pi * D) * (1 / D2 + (2 + q1 + q2) / P) + phi
        return value, slope

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        def fields_of(q: Tensor) -> tuple[Tensor, Tensor]:
            return (1 + require_resolved("GELU", q)).rsqrt(), q

        return (Operation(GATE, register, fields_of=fields_of),)


class AbstractWave(AbstractEntire):
    """A wave a sin(bz + c₀). The field `c` is c₀. In the formulas, c is the covariance.

    e₋ = exp(b²(c − (q₁ + q₂)/2)),  e₊ = exp(−b²(c + (q₁ + q₂)/2)) cos 2c₀,
    κ = a²/2 (e₋ − e₊),    κ̇ = a²b²/2 (e₋ + e₊)
    """

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    @abstractmethod
    def phase(self) -> float:
        """cos 2c₀, for the wave a sin(bz + c₀)."""

    @property
    def squared_frequency(self) -> float:
        return self.b**2

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:
        a = self.a
        b = self.b
        mean = (q1 + q2) / 2
        minus = torch.exp(b * b * (c - mean))  # e₋
        plus = torch.exp(-b * b * (c + mean)) * self.phase  # e₊
        value = a * a / 2 * (minus - plus)
        slope = a * a * b * b / 2 * (minus + plus)
        return value, slope

    def resolved(self, moments: PairMoments) -> NearKernels:
        """Return κ and κ̇ by the formulas of the class. Compute e₋ and e₊ from
        distances, which do not cancel: e₋ = exp(−b² E(u − v)²/2) and
        e₊ = exp(−b² E(u + v)²/2) cos 2c₀."""
        a = self.a
        b2 = self.squared_frequency
        minus = torch.exp(-b2 * moments.distances.of_difference / 2)
        plus = torch.exp(-b2 * moments.distances.of_sum / 2) * self.phase
        value = a * a / 2 * (minus - plus)
        slope = a * a * b2 / 2 * (minus + plus)
        return NearKernels(value, slope, None)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        name = type(self).__name__
        b2 = self.b**2

        def fields_of(q: Tensor) -> tuple[Tensor]:
            return (b2 / 2 * require_resolved(name, q, b2),)

        constants = (self.a**2 / 2, b2, self.phase)
        wave = Operation(WAVE, register, constants=constants, fields_of=fields_of)
        return (wave,)


class Sin(AbstractWave):
    """σ(z) = a sin(bz + c)."""

    @property
    def phase(self) -> float:
        return cos(2 * self.c)

    def apply(self, z: Values) -> Values:
        return self.a * torch.sin(self.b * z + self.c)


class Cos(AbstractWave):
    """σ(z) = a cos(bz + c)."""

    @property
    def phase(self) -> float:
        return -cos(2 * self.c)

    def apply(self, z: Values) -> Values:
        return self.a * torch.cos(self.b * z + self.c)
