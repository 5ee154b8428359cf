"""Derivatives of one training step: Hessian-vector products, products with per-example
gradients, and the derivative of clipping.

Let g(θ, κ) = Σ κᵢ∇ℓᵢ(θ) be the gradient of a step, where ℓᵢ is the loss of example i and
κᵢ its share in the loss of the step. Let H be the Hessian ∂g/∂θ. For a vector γ, one
backward pass through γ·g gives both Hγ and the products of γ with the per-example
gradients:

    (Hγ, γ·∇ℓ₁ … γ·∇ℓ_B) = the gradient of γ·g in (θ, κ)

Autograd records g once. The backward pass is vectorized over many γ, and forms no
gradient of a single example. Forward mode (Pearlmutter 1994) would take 1.5 to 2 times
as long.

>>> square = TakenBatch(
...     examples=torch.tensor([0]),
...     shares=torch.tensor([0.5]),
...     losses=lambda weights: weights.square().sum()[None],
... )
>>> recorded = recorded_gradient((square,), torch.tensor([1.0, 2.0]))
>>> curved, along = recorded.curvature(torch.tensor([[1.0, 1.0]]))
>>> recorded.gradient.tolist(), curved.tolist(), along.tolist()
([1.0, 2.0], [[1.0, 1.0]], [[6.0]])
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Num
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from ntkexp.effects.trajectory import FlatWeights, TakenBatch
from ntkexp.kernel import plain_kernels
from ntkexp.kernel.features.cancellation import credit
from ntkexp.optimizer.base import GUARD
from ntkexp.stream import normal, stream

Mapped = TypeVar("Mapped", Tensor, tuple[Tensor, Tensor])


def batched_map(
    function: Callable[..., Mapped],
    *arguments: Num[Tensor, "several ..."],
    chunk_size: int | None = None,
) -> Mapped:
    """Map a function over the first axis, `chunk_size` elements at a time, or all at
    once by default.

    `vmap` does not support functions that branch on tensor values. Map such a function
    over one element at a time.

    >>> batched_map(lambda x: x * 2 if x.sum() > 0 else x, torch.tensor([[1.0], [-1.0]]))
    tensor([[ 2.],
            [-1.]])
    """
    try:
        mapped: Mapped = vmap(function, chunk_size=chunk_size, randomness="same")(
            *arguments
        )
    except RuntimeError:
        # if the function itself is wrong, `one_by_one` raises the error again
        return one_by_one(function, *arguments)
    return mapped


def one_by_one(
    function: Callable[..., Mapped], *arguments: Num[Tensor, "several ..."]
) -> Mapped:
    """Map a function over the first axis without `vmap`."""
    results: list[Any] = [function(*row) for row in zip(*arguments, strict=True)]
    stacked: Any = tree_map(lambda *parts: torch.stack(parts), *results)
    mapped: Mapped = stacked
    return mapped


def gradient(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]
) -> Float[Tensor, " weight"]:
    """Return g = Σ κᵢ∇ℓᵢ."""
    shares = torch.cat([batch.shares for batch in batches])
    with plain_kernels():
        g: Tensor = grad(partial(summed, batches))(weights, shares)
    return g


@dataclass(frozen=True)
class RecordedGradient:
    """The gradient g of a step, and its backward pass `pullback`, which maps γ to (Hγ,
    γ·∇ℓ₁ … γ·∇ℓ_B)."""

    gradient: Float[Tensor, " weight"]
    pullback: Callable[[Tensor], tuple[Tensor, Tensor]]

    def curvature(
        self, vectors: Float[Tensor, "vector weight"], chunk_size: int | None = None
    ) -> tuple[Float[Tensor, "vector weight"], Float[Tensor, "vector row"]]:
        """Return the Hessian-vector product Hγ for each γ in `vectors`, and γ·∇ℓᵢ for
        each row i of all batches. A row is one loss ℓᵢ. One vectorized backward pass
        handles `chunk_size` vectors, or all by default."""
        with plain_kernels():
            return batched_map(self.pullback, vectors, chunk_size=chunk_size)


def recorded_gradient(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]
) -> RecordedGradient:
    """Compute g = Σ κᵢ∇ℓᵢ and record its graph. Without batches, g is zero."""
    if not batches:
        zero = torch.zeros_like(weights)
        return RecordedGradient(
            zero, lambda vector: (torch.zeros_like(vector), vector[:0])
        )
    shares = torch.cat([batch.shares for batch in batches])
    with plain_kernels():
        result = vjp(grad(partial(summed, batches)), weights, shares)
    return RecordedGradient(result[0], result[1])


def scores(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    vectors: Float[Tensor, "vector weight"],
    chunk_size: int | None = None,
) -> Float[Tensor, "vector row"]:
    """Return γ·∇ℓᵢ for each γ in `vectors` and each row i of all batches, without
    computing Hγ."""

    def losses(at: Tensor) -> Tensor:
        return torch.cat([batch.losses(at) for batch in batches])

    def along(vector: Tensor) -> Tensor:
        derivative: Tensor = jvp(losses, (weights,), (vector,))[1]
        return derivative

    load_forward_mode()
    with plain_kernels():
        return batched_map(along, vectors, chunk_size=chunk_size)


def row_gradients(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]
) -> Iterator[Float[Tensor, "row weight"]]:
    """Yield the gradients ∇ℓᵢ of the rows of each batch."""
    for batch in batches:
        with plain_kernels():
            gradients: Tensor = jacrev(batch.losses)(weights)
        yield gradients


@cache
def load_forward_mode() -> None:
    """Load torch's forward-mode rules without the warnings that they raise
    on import."""
    with warnings.catch_warnings():
        # FutureWarning since torch 2.15
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def summed(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    shares: Float[Tensor, " row"],
) -> Float[Tensor, ""]:
    """Return the loss of a step, Σ κᵢℓᵢ over the rows of all
    batches, where κ is `shares`."""
    return torch.cat([batch.losses(weights) for batch in batches]) @ shares


# --- Gradients that consist only of rounding errors, because the terms κᵢ∇ℓᵢ cancel.
#
# If an optimizer divides such a gradient by its own size, the derivative of the step is
# up to 1/ε too large (ε is the constant in the denominator). To find such gradients,
# compare g with the size of its terms. Random factors ξᵢ estimate this size without the
# gradient of any single example:
#
#     Σᵢ (κᵢ∇ℓᵢ)² ≈ (Σᵢ ξᵢκᵢ∇ℓᵢ)²,        ξᵢ ~ N(0, 1)


# number of draws of the random factors ξ; the sum of a single draw may be small by
# chance
DRAWS = 2


def credit_of_rows(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    gradient: Float[Tensor, " weight"],
    flat: FlatWeights,
) -> Float[Tensor, " weight"] | None:
    """Return the credit of each element of a gradient: 0 if it is only rounding error,
    and 1 otherwise. Return None if the credit is 1 everywhere."""
    shares = torch.cat([batch.shares for batch in batches])
    squares = torch.zeros_like(weights)
    generator = stream("terms", len(shares))
    for _ in range(DRAWS):
        # Σᵢ ξᵢκᵢ∇ℓᵢ
        factors = normal(generator, len(shares)).to(shares)
        with plain_kernels():
            drawn: Tensor = grad(partial(summed, batches))(weights, shares * factors)
        squares += drawn.square()

    # the size of the terms κᵢ∇ℓᵢ: a number for each element of a parameter with at most
    # one axis (such as a bias), and one norm for every other parameter
    terms = flat.weights(squares.sqrt())
    sizes = {}
    for name, term in terms.items():
        sizes[name] = term if term.dim() <= 1 else term.norm()
    credited = credit(flat.weights(gradient), sizes)
    if not credited:
        return None
    ones = {name: torch.ones_like(term) for name, term in terms.items()}
    return flat.vector(ones | credited)


# --- Clipping to the norm k: g ↦ c g with c = min(1, k/(‖g‖ + 1e-6)).
#
# Its derivative maps the adjoint p̂ of c g to the adjoint γ of g:
#
#     γ = c p̂ − k/(‖g‖ + 1e-6)² · (p̂·g)/‖g‖ · g    if c < 1,    γ = p̂ otherwise


@dataclass(frozen=True)
class Clipping:
    """The gradient of a step, and the largest norm that clipping allows (None: no clipping).

    >>> import torch
    >>> adjoint = torch.tensor([[3.0, 4.0], [4.0, -3.0]])
    >>> Clipping(torch.tensor([3.0, 4.0]), 1.0).pull_back(adjoint).round(decimals=3).tolist()
    [[0.0, 0.0], [0.800000011920929, -0.6000000238418579]]
    """

    gradient: Float[Tensor, " weight"]
    norm: float | None

    @property
    def factor(self) -> float:
        """The clipping factor c."""
        if self.norm is None:
            return 1.0
        return min(1.0, self.norm / (float(self.gradient.norm()) + GUARD))

    def pull_back(
        self, adjoint: Float[Tensor, "vector weight"]
    ) -> Float[Tensor, "vector weight"]:
        """Return the adjoint γ of the gradient from the adjoint p̂
        of the clipped gradient."""
        if self.norm is None or self.factor == 1.0:
            return adjoint
        size = float(self.gradient.norm())
        shortening = self.norm / (size + GUARD) ** 2 / size * (adjoint @ self.gradient)
        return self.factor * adjoint - shortening[:, None] * self.gradient
