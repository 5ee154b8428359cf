"""Smooth activations by Mehler's series in Hermite polynomials: any of them, by name, or polynomials, for which the
series ends.

With h_k = He_k/√k! and z ~ N(0, 1), a function of a Gaussian of variance q has coefficients a_k(q) = E σ(√q z) h_k(z),
and with ρ = c/√(q₁q₂) (Mehler 1866; Daniely, Frostig & Singer 2016)

    κ = Σ_k a_k(q₁) a_k(q₂) ρᵏ,    κ̇ the same with the coefficients of σ′.

The expectations are trapezoid sums, which converge exponentially for analytic functions. As many terms are taken as it
takes for Σ a_k² to reach E σ²; a kink would take millions.

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
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.mistake import Mistake, nearest

Function = Callable[[Float[Tensor, " node"]], Float[Tensor, "term node"]]
CHEBYSHEV_NODES = (48, 96)
CLOSE = 1e-14
"""The share of the largest value that the last terms of a sum may have."""
PROBES = 9


def interpolated(function: Function, q: Float[Tensor, "*q"]) -> Float[Tensor, "term *q"]:
    """The function at all variances, by a Chebyshev sum in their roots where there are more variances than nodes.

    The sum is taken if its last terms say that it has converged and some of the variances agree; else the function
    itself.

    >>> q = torch.linspace(0.5, 2, 1000, dtype=torch.float64)
    >>> float((interpolated(lambda q: q.exp()[None], q) - q.exp()).abs().max()) < 1e-13
    True
    """
    x, low, high = q.flatten().double(), float(q.min().sqrt()), float(q.max().sqrt())
    some = x[torch.linspace(0, len(x) - 1, PROBES).long()]
    for count in CHEBYSHEV_NODES if high > low else ():
        if 2 * count > len(x):
            break
        # The sum's coefficients, from the function at nodes alone.
        degrees = torch.arange(count, dtype=torch.float64)[:, None]
        angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (pi / count)
        values = function(((low + high) / 2 + (high - low) / 2 * angles.cos()).square())
        sums = values @ (degrees * angles).cos().t() * (2 / count)
        sums[:, 0] /= 2

        def chebyshev_sum(q: Tensor, degrees: Tensor = degrees, sums: Tensor = sums) -> Tensor:
            angle = ((2 * q.sqrt() - (low + high)) / (high - low)).clamp(-1, 1).acos()
            return sums @ (degrees * angle).cos()

        room = CLOSE * float(values.abs().max())
        converged = float(sums[:, -4:].abs().max()) <= room
        if converged and float((chebyshev_sum(some) - function(some)).abs().max()) <= 2 * room:
            return chebyshev_sum(x).view(-1, *q.shape).to(q.dtype)
    return function(x).view(-1, *q.shape).to(q.dtype)


ORDERS = (32, 64, 128, 256, 512, 1024, 2048)
ENOUGH, TOO_FEW = 1e-14, 1e-6
"""Shares of E σ² that the series may leave out, and that it may not."""
REACH, QUADRATURE_NODES = 12.5, 2048
"""A normal density is less than 1e-34 beyond; poles at a distance of 0.05 are resolved."""
ROWS = 4096  # variances at a time
SHARES = {torch.float64: ENOUGH, torch.float32: 1e-8}
"""What the fused form may leave out of E σ′², by Cauchy and Schwarz the most by which κ̇ is off."""
TOGETHER = 4  # terms that it takes at a time


class AbstractSmooth(AbstractPointwise):
    """A function has derivatives of every order."""

    def order(self, variance: float) -> int:
        """The terms that are taken for variances up to this one: the series of σ and σ′ then leave out next to nothing
        of E σ² and E σ′² where u = v.
        """
        q = torch.tensor([variance], dtype=torch.float64)
        for order in ORDERS:
            shares = zip(self.coefficients(q, order), self.alone(q), strict=True)
            # a variance that is not finite gives a kernel that is not either, which is refused at the end
            missing = (
                float(1 - (a.square().sum() / whole)) for a, whole in shares if float(whole) > 0
            )
            left_out = max(missing, default=0.0)
            if left_out <= ENOUGH:
                return order
        if left_out > TOO_FEW:
            raise Mistake(
                f"{type(self).__name__}: at variance {variance:.3g} it is too steep for Mehler's series, of which "
                f"{order} terms miss {left_out:.1g}; lower W_std, or choose Erf"
            )
        return order

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> tuple[Tensor, Tensor]:
        largest = max(
            (float(end.variance.detach().max()) for end in (first, second) if end.variance.numel()),
            default=0,
        )
        order = self.order(largest)
        root = (first.lay_out(first.variance) * second.lay_out(second.variance)).sqrt()
        rho, sums = c / torch.where(root > 0, root, 1.0), []
        ends = (self.coefficients(end.variance, order) for end in (first, second))
        for a, b in zip(
            *ends, strict=True
        ):  # of σ, then of σ′: Σ_k a_k b_k ρᵏ, from the last term on
            total = torch.zeros_like(rho)
            for one, two in zip(reversed(a.unbind()), reversed(b.unbind()), strict=True):
                total = total * rho + first.lay_out(one) * second.lay_out(two)
            sums.append(total)
        return sums[0], sums[1]

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return self.between(
            PairEnd(q1, lambda values: values), c, PairEnd(q2, lambda values: values)
        )

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.split(q.flatten().double(), ROWS)
        parts = [self.expectations(part, lambda f: f.square().sum(1)) for part in rows]
        value, slope = (
            torch.cat(each).view(q.shape).to(q.dtype) for each in zip(*parts, strict=True)
        )
        return value, slope

    def coefficients(self, q: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """a_k(q) of σ and of σ′, [term, *q]."""
        basis = hermite(order).to(q.device)
        parts = [
            self.expectations(part, lambda f: f @ basis.t())
            for part in torch.split(q.flatten().double(), ROWS)
        ]
        value, slope = (
            torch.cat(each).t().view(-1, *q.shape).to(q.dtype) for each in zip(*parts, strict=True)
        )
        return value, slope

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        first, step = self.correlation_powers
        return (Operation(SERIES, register, constants=(float(first), float(step)), ends=self.ends),)

    @property
    def correlation_powers(self) -> tuple[int, int]:
        """The first power of ρ in κ̇, and the steps in which they grow: two, if σ is odd or even."""
        z = self.apply(nodes())
        near = 4 * torch.finfo(z.dtype).eps * z.abs().max()
        odd, even = (bool((z + sign * z.flip(0)).abs().max() <= near) for sign in (1, -1))
        return (0, 2) if odd else (1, 2) if even else (0, 1)

    def ends(self, q: Tensor) -> tuple[Tensor, ...]:
        """1/√q, E σ, and as many coefficients of σ′ as the largest variance needs in its precision.

        With b_k those of σ′, a_k = √q b_{k−1}/√k: κ = a₀a₀ + c Σ b_k b_k ρᵏ/(k + 1).
        """
        first, step = self.correlation_powers
        count = self.count(float(q.max()), q.dtype)
        order = next((order for order in ORDERS if order >= count), count)

        def both(q: Tensor) -> Tensor:
            value, slope = self.coefficients(q, order)
            return torch.cat([value[:1], slope[first:count:step]])

        terms = interpolated(both, q).unbind()
        missing = (1 - len(terms)) % TOGETHER
        return root_and_inverse(q)[1], *terms, *(torch.zeros_like(q),) * missing

    def count(self, variance: float, dtype: torch.dtype) -> int:
        """The terms of κ̇ that matter in a precision, for variances up to this one."""
        q = torch.tensor([variance], dtype=torch.float64)
        squared = self.coefficients(q, self.order(variance))[1].flatten().square()
        rest = squared.flip(0).cumsum(0).flip(0)
        return max(2, int((rest > SHARES[dtype] * rest[0]).sum()))

    def expectations(
        self, q: Float[Tensor, " row"], of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What `of` makes of σ(√q z) and of σ′(√q z), each times the root of its weight, at all nodes."""
        z, root = nodes().to(q.device), densities().sqrt().to(q.device)
        differentiable = q.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            u = q.sqrt()[:, None] * z
            u = u if differentiable else u.detach().requires_grad_()
            value = self.apply(u)
            (slope,) = torch.autograd.grad(value.sum(), u, create_graph=differentiable)
        return of((value if differentiable else value.detach()) * root), of(slope * root)


@cache
def nodes() -> Float[Tensor, " node"]:
    """The nodes at which expectations are taken."""
    return torch.linspace(-REACH, REACH, QUADRATURE_NODES + 1, dtype=torch.float64)


@cache
def densities() -> Float[Tensor, " node"]:
    """Find the normal density at the nodes, times their distance."""
    z = nodes()
    return torch.exp(-z * z / 2) * (2 * REACH / QUADRATURE_NODES / sqrt(2 * pi))


@cache
def hermite(order: int) -> Float[Tensor, "term node"]:
    """h_k √density up to an order, by √(k+1) h_{k+1} = z h_k − √k h_{k−1}."""
    z = nodes()
    rows = [densities().sqrt(), z * densities().sqrt()]
    for k in range(1, order):
        rows.append((z * rows[k] - sqrt(k) * rows[k - 1]) / sqrt(k + 1))
    return torch.stack(rows[: order + 1])


class Tanh(AbstractSmooth):
    """σ(z) = tanh z."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.tanh(z)


class SiLU(AbstractSmooth):
    """σ(z) = z / (1 + exp(−z))."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.silu(z)


MOST = 16  # degrees, at which the trapezoid sums of squares still end before their nodes do


class Polynomial(AbstractSmooth):
    """Polynomial activations: Mehler's series ends, so that their kernels are exact.

    σ(z) = Σ_k powers[k] zᵏ, from the constant on.

    >>> kappa, slope = Hermite(degree=2).dual(*torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64))
    >>> abs(float(kappa) - 0.25) < 1e-14, abs(float(slope) - 2 * 0.5) < 1e-14
    (True, True)
    """

    powers: Annotated[tuple[float, ...], Field(min_length=1, max_length=MOST + 1)]

    def order(self, variance: float) -> int:
        return len(self.powers) - 1

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        total = torch.full_like(z, self.powers[-1])
        for power in reversed(self.powers[:-1]):
            total = total * z + power
        return total


class Hermite(AbstractSmooth):
    """σ(z) = He_d(z)/√d!, of degree d."""

    degree: int = Field(2, ge=0, le=MOST)

    def order(self, variance: float) -> int:
        return self.degree

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        before, value = torch.zeros_like(z), torch.ones_like(z)
        for k in range(self.degree):
            before, value = value, (z * value - sqrt(k) * before) / sqrt(k + 1)
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
KINKED = {"abs": "Abs", "leaky_relu": "LeakyReLU", "relu": "ReLU"}
"""The layers of functions with a kink."""


def smooth_function_name(name: str) -> str:
    """The name of a function that has a series."""
    if name in KINKED:
        raise Mistake(
            f"fn={name} has a kink, which Mehler's series never meets; choose the layer {KINKED[name]}"
        )
    if name not in FUNCTIONS:
        raise Mistake(
            f"fn={name} is none of {', '.join(FUNCTIONS)}{nearest(name, [*FUNCTIONS, *KINKED])}"
        )
    return name


class Generic(AbstractSmooth):
    """Smooth activations by the names of their functions.

    σ by its name; `deg` is read by others, and plays no part here.

    >>> Generic(fn="tanh").apply(torch.zeros(1))
    tensor([0.])
    """

    fn: Annotated[str, AfterValidator(smooth_function_name)]
    deg: CountOrNone = 0

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return FUNCTIONS[self.fn](z)
