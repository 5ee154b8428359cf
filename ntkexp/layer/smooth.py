"""Any smooth activation, by Mehler's series in Hermite polynomials.

With h_k = He_k/√k! and z ~ N(0, 1), a function of a Gaussian of variance q has coefficients a_k(q) = E σ(√q z) h_k(z),
and with ρ = c/√(q₁q₂) (Mehler 1866; Daniely, Frostig & Singer 2016)

    κ = Σ_k a_k(q₁) a_k(q₂) ρᵏ,    κ̇ the same with the coefficients of σ′.

The expectations are trapezoid sums, which converge exponentially for analytic functions. As many terms are taken as it
takes for Σ a_k² to reach E σ²; a kink would take millions.

>>> from math import exp, sinh
>>> from ntkexp.layer.generic import Generic
>>> kappa, slope = Generic(fn="sin").dual(*torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
>>> abs(float(kappa) - exp(-1.5) * sinh(0.5)) < 1e-14
True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.covariance.covariance import PairEnd
from ntkexp.covariance.operation import Operations, roots, series
from ntkexp.layer.interpolation import interpolated
from ntkexp.layer.pointwise import AbstractPointwise
from ntkexp.mistake import Mistake

ORDERS = (32, 64, 128, 256, 512, 1024, 2048)
ENOUGH, TOO_FEW = 1e-14, 1e-6
"""Shares of E σ² that the series may leave out, and that it may not."""
REACH, NODES = 12.5, 2048  # a normal density is less than 1e-34 beyond; poles at a distance of 0.05 are resolved
ROWS = 4096  # variances at a time
SHARES = {torch.float64: ENOUGH, torch.float32: 1e-8}
"""What the fused form may leave out of E σ′², by Cauchy and Schwarz the most by which κ̇ is off."""
TOGETHER = 4  # terms that it takes at a time


class AbstractSmooth(AbstractPointwise):
    """A function has derivatives of every order."""

    def order(self, variance: float) -> int:
        """The terms that are taken for variances up to this one."""
        q = torch.tensor([variance], dtype=torch.float64)
        for order in ORDERS:
            left_out = self.left_out(q, order)
            if left_out <= ENOUGH:
                return order
        if left_out > TOO_FEW:
            raise Mistake(
                f"{type(self).__name__}: at variance {variance:.3g} it is too steep for Mehler's series, of which "
                f"{order} terms miss {left_out:.1g}; lower W_std, or choose Erf"
            )
        return order

    def left_out(self, q: Float[Tensor, "1"], order: int) -> float:
        """The series of σ and σ′ leave out this share where u = v, or that, whichever is larger."""
        shares = zip(self.coefficients(q, order), self.alone(q), strict=True)
        return max(float(1 - (a.square().sum() / whole)) for a, whole in shares if float(whole) > 0)

    def between(self, first: PairEnd, c: Tensor, second: PairEnd) -> tuple[Tensor, Tensor]:
        largest = max(
            (float(end.variance.detach().max()) for end in (first, second) if end.variance.numel()), default=0
        )
        order = self.order(largest)
        one, two = (self.coefficients(end.variance, order) for end in (first, second))
        root = (first.lay_out(first.variance) * second.lay_out(second.variance)).sqrt()
        rho = c / torch.where(root > 0, root, 1.0)
        value, slope = (summed(a, b, rho, first, second) for a, b in zip(one, two, strict=True))
        return value, slope

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return self.between(PairEnd(q1, lambda values: values), c, PairEnd(q2, lambda values: values))

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.expectations(part, squares) for part in torch.split(q.flatten().double(), ROWS)]
        value, slope = (torch.cat(each).view(q.shape).to(q.dtype) for each in zip(*parts, strict=True))
        return value, slope

    def coefficients(self, q: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """a_k(q) of σ and of σ′, [term, *q]."""
        basis = hermite(order).to(q.device)
        parts = [self.expectations(part, lambda f: f @ basis.t()) for part in torch.split(q.flatten().double(), ROWS)]
        value, slope = (torch.cat(each).t().view(-1, *q.shape).to(q.dtype) for each in zip(*parts, strict=True))
        return value, slope

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        first, step = self.correlation_powers
        return (series(register, first, step, self.ends),)

    @property
    def correlation_powers(self) -> tuple[int, int]:
        """The first power of ρ in κ̇, and the steps in which they grow: two, if σ is odd or even."""
        z = self.apply(nodes())
        near = 4 * torch.finfo(z.dtype).eps * z.abs().max()
        odd, even = (bool((z + sign * z.flip(0)).abs().max() <= near) for sign in (1, -1))
        return (0, 2) if odd else (1, 2) if even else (0, 1)

    def ends(self, q: Tensor) -> tuple[Tensor, ...]:
        """1/√q, E σ, and as many coefficients of σ′ as the largest variance needs.

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
        return roots(q)[1], *terms, *(torch.zeros_like(q),) * missing

    def count(self, variance: float, dtype: torch.dtype) -> int:
        """The terms of κ̇ that matter in a precision, for variances up to this one."""
        q = torch.tensor([variance], dtype=torch.float64)
        squared = self.coefficients(q, self.order(variance))[1].flatten().square()
        rest = squared.flip(0).cumsum(0).flip(0)
        return max(2, int((rest > SHARES[dtype] * rest[0]).sum()))

    def expectations(self, q: Float[Tensor, " row"], of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What `of` makes of σ(√q z) and of σ′(√q z), each times the root of its weight, at all nodes."""
        z, root = nodes().to(q.device), densities().sqrt().to(q.device)
        wanted = q.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            u = q.sqrt()[:, None] * z
            u = u if wanted else u.detach().requires_grad_()
            value = self.apply(u)
            (slope,) = torch.autograd.grad(value.sum(), u, create_graph=wanted)
        return of((value if wanted else value.detach()) * root), of(slope * root)


def squares(f: Float[Tensor, "row node"]) -> Float[Tensor, " row"]:
    """Σ f²."""
    return f.square().sum(1)


def summed(a: Tensor, b: Tensor, rho: Tensor, first: PairEnd, second: PairEnd) -> Tensor:
    """Σ_k a_k b_k ρᵏ, from the last term on."""
    total = torch.zeros_like(rho)
    for one, two in zip(reversed(a.unbind()), reversed(b.unbind()), strict=True):
        total = total * rho + first.lay_out(one) * second.lay_out(two)
    return total


@cache
def nodes() -> Float[Tensor, " node"]:
    """The nodes at which expectations are taken."""
    return torch.linspace(-REACH, REACH, NODES + 1, dtype=torch.float64)


@cache
def densities() -> Float[Tensor, " node"]:
    """Find the normal density at the nodes, times their distance."""
    z = nodes()
    return torch.exp(-z * z / 2) * (2 * REACH / NODES / sqrt(2 * pi))


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
