"""Smooth activations, by Mehler's series in Hermite polynomials.

The kernels κ and κ̇ of an activation σ are expectations over two Gaussians with
variances q₁ and q₂ and covariance c (see `AbstractPointwise`). Let h_k = He_k/√k! be the
normalised Hermite polynomials, and z ~ N(0, 1). At variance q, σ has the Hermite
coefficients a_k(q) = E σ(√q z) h_k(z). With the correlation ρ = c/√(q₁q₂) (Mehler 1866;
Daniely, Frostig & Singer 2016),

    κ = Σ_k a_k(q₁) a_k(q₂) ρᵏ,    κ̇ has the same form with the coefficients of σ′.

The expectations are computed by the trapezoidal rule, which converges exponentially for
analytic functions. The series is truncated when Σ a_k² reaches E σ² to rounding. For a
polynomial, the series is finite. For a function with a kink, it would need millions of
terms.

>>> from math import exp, sinh
>>> kappa, slope = Generic(fn="sin").dual(*torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
>>> abs(float(kappa) - exp(-1.5) * sinh(0.5)) < 1e-14
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import pi, sqrt
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field
from torch import Tensor

from ntkexp.component import CountOrNone
from ntkexp.covariance.covariance import PairEnd
from ntkexp.covariance.pairs import SERIES, Operation, Operations, root_and_inverse
from ntkexp.layer.pointwise import AbstractPointwise, ValueAndSlope, Values
from ntkexp.mistake import Mistake, nearest
from ntkexp.shapes import Shape

Function = Callable[[Float[Tensor, " node"]], Float[Tensor, "term node"]]
CHEBYSHEV_NODES = (48, 96)
CHEBYSHEV_TOLERANCE = 1e-14
"""Largest accepted value of the last terms of a Chebyshev sum,
relative to the largest function value. """
CHECKED_VARIANCES = 9


def interpolated(
    function: Function, q: Float[Tensor, "*q"]
) -> Float[Tensor, " term *q"]:
    """Evaluate a function at many variances q, if possible by a Chebyshev interpolation
    in √q.

    The interpolation needs fewer evaluations of the function. Use it only if the last
    terms of the Chebyshev sum are negligible, and if the sum agrees with the function at
    CHECKED_VARIANCES of the variances.

    >>> q = torch.linspace(0.5, 2, 1000, dtype=torch.float64)
    >>> float((interpolated(lambda q: q.exp()[None], q) - q.exp()).abs().max()) < 1e-13
    True
    """
    x = q.flatten().double()
    low = float(q.min().sqrt())
    high = float(q.max().sqrt())
    checked = x[torch.linspace(0, len(x) - 1, CHECKED_VARIANCES).long()]
    evaluate = function
    for count in CHEBYSHEV_NODES:
        if not high > low or 2 * count > len(x):  # a variance may be NaN
            break

        # Chebyshev coefficients, from the function values at the nodes
        degrees = torch.arange(count, dtype=torch.float64)[:, None]
        angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (pi / count)
        roots = (low + high) / 2 + (high - low) / 2 * angles.cos()
        values = function(roots.square())
        sums = values @ (degrees * angles).cos().t() * (2 / count)
        sums[:, 0] /= 2

        def chebyshev_sum(
            q: Tensor, degrees: Tensor = degrees, sums: Tensor = sums
        ) -> Tensor:
            cosine = (2 * q.sqrt() - (low + high)) / (high - low)
            angle = cosine.clamp(-1, 1).acos()
            return sums @ (degrees * angle).cos()

        tolerance = CHEBYSHEV_TOLERANCE * float(values.abs().max())
        if float(sums[:, -4:].abs().max()) > tolerance:
            continue
        error = (chebyshev_sum(checked) - function(checked)).abs().max()
        if float(error) <= 2 * tolerance:
            evaluate = chebyshev_sum
            break
    return evaluate(x).view(-1, *q.shape).to(q.dtype)


ORDERS = (32, 64, 128, 256, 512, 1024, 2048)
NEGLIGIBLE_SHARE = 1e-14
"""Truncate the series when the missing share of E σ² is at most this value."""
MAX_MISSING_SHARE = 1e-6
"""Raise if even the longest series misses more than this share of E σ²."""
QUADRATURE_REACH = 12.5
"""The quadrature runs from −12.5 to 12.5. Outside,
the normal density is below 1e-34."""
QUADRATURE_NODES = 2048
"""Number of quadrature intervals. It suffices for functions whose poles are at least
0.05 from the real line. """
VARIANCES_AT_ONCE = 4096
FUSED_MISSING_SHARE = {torch.float64: NEGLIGIBLE_SHARE, torch.float32: 1e-8}
"""The share of E σ′² that the series of the fused engine may miss. By Cauchy–Schwarz,
this share bounds the relative error of κ̇."""
TOGETHER = 4
"""Number of terms that the fused form adds in one pass."""


class AbstractSmooth(AbstractPointwise):
    """An analytic activation."""

    def order(self, variance: float) -> int:
        """Return the order at which the series are truncated,
        for variances up to `variance`.

        The series of σ and σ′ then miss a negligible share of E σ² and E σ′². Raise if
        all available orders miss too much. If the variance is not finite, the kernel is
        not finite either, and the caller raises."""
        q = torch.tensor([variance], dtype=torch.float64)
        for order in ORDERS:
            missing = 0.0
            functions = zip(self.coefficients(q, order), self.alone(q), strict=True)
            for coefficients, square in functions:
                if float(square) > 0:
                    share = 1 - coefficients.square().sum() / square
                    missing = max(missing, float(share))
            if missing <= NEGLIGIBLE_SHARE:
                return order
        if missing > MAX_MISSING_SHARE:
            raise Mistake(
                f"{type(self).__name__}: at variance {variance:.3g} it is too steep for Mehler's "
                f"series, of which {order} terms miss {missing:.1g}; lower W_std, or choose Erf"
            )
        return order

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> ValueAndSlope:
        q1 = first.variance
        q2 = second.variance
        largest = [float(q.detach().max()) for q in (q1, q2) if q.numel()]
        order = self.order(max(largest, default=0))
        root = (first.broadcast(q1) * second.broadcast(q2)).sqrt()
        rho = c / torch.where(root > 0, root, 1.0)

        def series(a: Tensor, b: Tensor) -> Tensor:
            # Σ_k a_k b_k ρᵏ by Horner's scheme
            total = torch.zeros_like(rho)
            for k in reversed(range(len(a))):
                total = total * rho + first.broadcast(a[k]) * second.broadcast(b[k])
            return total

        value1, slope1 = self.coefficients(q1, order)
        value2, slope2 = self.coefficients(q2, order)
        return series(value1, value2), series(slope1, slope2)

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> ValueAndSlope:

        def unchanged(values: Tensor) -> Tensor:
            return values

        return self.between(PairEnd(q1, unchanged), c, PairEnd(q2, unchanged))

    def alone(self, q: Tensor) -> ValueAndSlope:
        value, slope = self.in_portions(q, lambda f: f.square().sum(1))
        return value.view(q.shape), slope.view(q.shape)

    def coefficients(self, q: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """Return the coefficients a_k(q) of σ and of σ′, each [term, *q]."""
        basis = hermite(order).to(q.device)
        value, slope = self.in_portions(q, lambda f: f @ basis.t())
        return value.t().view(-1, *q.shape), slope.t().view(-1, *q.shape)

    def in_portions(
        self, q: Tensor, of: Callable[[Tensor], Tensor]
    ) -> tuple[Float[Tensor, "row ..."], Float[Tensor, "row ..."]]:
        """Return `expectations(q, of)` for all variances q,
        computed for a few of them at a time."""
        values = []
        slopes = []
        for portion in torch.split(q.flatten().double(), VARIANCES_AT_ONCE):
            value, slope = self.expectations(portion, of)
            values.append(value)
            slopes.append(slope)
        return torch.cat(values).to(q.dtype), torch.cat(slopes).to(q.dtype)

    def fused(self, shape: Shape, register: int, free: int) -> Operations:
        first, step = self.correlation_powers
        constants = (float(first), float(step))
        return (
            Operation(SERIES, register, constants=constants, fields_of=self.fields_of),
        )

    @property
    def correlation_powers(self) -> tuple[int, int]:
        """The lowest power of ρ in κ̇, and the increment of the powers. The increment
        is 2 if σ is odd or even, else 1."""
        values = self.apply(nodes())
        tolerance = 4 * torch.finfo(values.dtype).eps * values.abs().max()
        mirrored = values.flip(0)
        is_odd = (values + mirrored).abs().max() <= tolerance
        if is_odd:
            return 0, 2
        is_even = (values - mirrored).abs().max() <= tolerance
        if is_even:
            return 1, 2
        return 0, 1

    def fields_of(self, q: Tensor) -> tuple[Tensor, ...]:
        """Return the functions of the variance that the operation SERIES of the fused
        engine needs: 1/√q, E σ, and the coefficients b_k of σ′.

        The largest variance determines the number of coefficients. Each product below
        has one factor from each example. Because a_k = √q b_{k−1}/√k, the value is κ =
        a₀a₀ + c Σ b_k b_k ρᵏ/(k + 1)."""
        first, step = self.correlation_powers
        count = self.count(float(q.max()), q.dtype)
        enough = [order for order in ORDERS if order >= count]
        order = min(enough, default=count)

        def fused_coefficients(q: Tensor) -> Tensor:
            value, slope = self.coefficients(q, order)
            return torch.cat([value[:1], slope[first:count:step]])

        _, inverse_root = root_and_inverse(q)
        terms = interpolated(fused_coefficients, q).unbind()
        missing = (1 - len(terms)) % TOGETHER
        return inverse_root, *terms, *(torch.zeros_like(q),) * missing

    def count(self, variance: float, dtype: torch.dtype) -> int:
        """Return the number of terms of κ̇ that exceed rounding in `dtype`, for
        variances up to `variance`."""
        q = torch.tensor([variance], dtype=torch.float64)
        _, slope = self.coefficients(q, self.order(variance))
        rest = slope.flatten().square().flip(0).cumsum(0).flip(0)  # Σ_{j ≥ k} b_j²
        matters = rest > FUSED_MISSING_SHARE[dtype] * rest[0]
        return max(2, int(matters.sum()))

    def expectations(
        self, q: Float[Tensor, " row"], of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Apply `of` to σ(√q z) √w and to σ′(√q z) √w at quadrature points z
        with weights w."""
        z = nodes().to(q.device)
        root = densities().sqrt().to(q.device)
        differentiable = q.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            u = q.sqrt()[:, None] * z
            if not differentiable:
                u = u.detach().requires_grad_()
            value = self.apply(u)
            (slope,) = torch.autograd.grad(value.sum(), u, create_graph=differentiable)
        if not differentiable:
            value = value.detach()
        return of(value * root), of(slope * root)


@cache
def nodes() -> Float[Tensor, " node"]:
    """Return the quadrature points of expectations."""
    count = QUADRATURE_NODES + 1
    return torch.linspace(
        -QUADRATURE_REACH, QUADRATURE_REACH, count, dtype=torch.float64
    )


@cache
def densities() -> Float[Tensor, " node"]:
    """Return the quadrature weights: the normal density times the distance between
    neighbouring points."""
    z = nodes()
    distance = 2 * QUADRATURE_REACH / QUADRATURE_NODES
    return torch.exp(-z * z / 2) * (distance / sqrt(2 * pi))


@cache
def hermite(order: int) -> Float[Tensor, "term node"]:
    """Return h_k √w for k ≤ order at the quadrature points.

    Recursion: √(k+1) h_{k+1} = z h_k − √k h_{k−1}.
    """
    z = nodes()
    rows = [densities().sqrt(), z * densities().sqrt()]
    for k in range(1, order):
        following = z * rows[k] - sqrt(k) * rows[k - 1]
        rows.append(following / sqrt(k + 1))
    return torch.stack(rows[: order + 1])


class Tanh(AbstractSmooth):
    """σ(z) = tanh z."""

    def apply(self, z: Values) -> Values:
        return torch.tanh(z)


class SiLU(AbstractSmooth):
    """σ(z) = z / (1 + exp(−z))."""

    def apply(self, z: Values) -> Values:
        return torch.nn.functional.silu(z)


MAX_DEGREE = 16
"""Largest degree. For polynomials up to this degree, σ² times the normal density is
negligible at the last quadrature points."""


class Polynomial(AbstractSmooth):
    """Polynomial activations σ(z) = Σ_k powers[k] zᵏ.

    Mehler's series is finite, so that the kernels are exact.

    >>> kappa, slope = Hermite(degree=2).dual(*torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64))
    >>> abs(float(kappa) - 0.25) < 1e-14, abs(float(slope) - 2 * 0.5) < 1e-14
    (True, True)
    """

    powers: Annotated[tuple[float, ...], Field(min_length=1, max_length=MAX_DEGREE + 1)]

    def order(self, variance: float) -> int:
        return len(self.powers) - 1

    def apply(self, z: Values) -> Values:
        total = torch.full_like(z, self.powers[-1])
        for power in reversed(self.powers[:-1]):
            total = total * z + power
        return total


class Hermite(AbstractSmooth):
    """σ(z) = He_d(z)/√d!, of degree d."""

    degree: int = Field(2, ge=0, le=MAX_DEGREE)

    def order(self, variance: float) -> int:
        return self.degree

    def apply(self, z: Values) -> Values:
        previous = torch.zeros_like(z)
        value = torch.ones_like(z)
        for k in range(self.degree):
            following = (z * value - sqrt(k) * previous) / sqrt(k + 1)
            previous = value
            value = following
        return value


FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "arctan": torch.arctan,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": torch.nn.functional.gelu,
    "mish": torch.nn.functional.mish,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "sin": torch.sin,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
}
KINKED_LAYERS = {"abs": "Abs", "leaky_relu": "LeakyReLU", "relu": "ReLU"}
"""Names of functions with a kink, and the layers to use instead."""


def smooth_function_name(name: str) -> str:
    """Return the name of a smooth function. Raise if it is unknown or has a kink."""
    if name in KINKED_LAYERS:
        raise Mistake(
            f"fn={name} has a kink, which Mehler's series never meets; choose the layer "
            f"{KINKED_LAYERS[name]}"
        )
    if name not in FUNCTIONS:
        hint = nearest(name, [*FUNCTIONS, *KINKED_LAYERS])
        raise Mistake(f"fn={name} is none of {', '.join(FUNCTIONS)}{hint}")
    return name


class Generic(AbstractSmooth):
    """Smooth activations, chosen by the name `fn` of a function.

    `deg` is accepted for compatibility with other libraries and has no effect.

    >>> Generic(fn="tanh").apply(torch.zeros(1))
    tensor([0.])
    """

    fn: Annotated[str, AfterValidator(smooth_function_name)]
    deg: CountOrNone = 0

    def apply(self, z: Values) -> Values:
        return FUNCTIONS[self.fn](z)
