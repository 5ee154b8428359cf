"""Products with the curvature of a step, γ·∇ℓᵢ for every row and H γ, and the way back through clipping.

What the gradient of a step makes of its examples, and of the weights: γ·∇ℓᵢ for every row, and H γ, in one pass.

    (Hγ, γ·∇ℓ₁ … γ·∇ℓ_B) = the gradient of γ·g in (θ, κ),        g(θ, κ) = Σ κᵢ∇ℓᵢ(θ)

The way back through the gradient is recorded once for all γ, which go back together, in chunks (Pearlmutter 1994 goes
forwards, which took half as long again, or twice as long). No gradient of a single example is made.

>>> square = TakenBatch(
...     examples=torch.tensor([0]), shares=torch.tensor([0.5]), losses=lambda weights: weights.square().sum()[None]
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
from ntkexp.kernel.features.cancellation import credit
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.optimizer.base import GUARD
from ntkexp.stream import stream

# --- Several vectors are taken through a function together, or one by one where that cannot be.


Found = TypeVar("Found", Tensor, tuple[Tensor, Tensor])


def at_once(
    function: Callable[..., Found],
    *several: Num[Tensor, "several ..."],
    together: int | None = None,
) -> Found:
    """So many at a time, all by default; one by one where a module looks at numbers and decides by them.

    >>> at_once(lambda x: x * 2 if x.sum() > 0 else x, torch.tensor([[1.0], [-1.0]]))
    tensor([[ 2.],
            [-1.]])
    """
    try:
        found: Found = vmap(function, chunk_size=together, randomness="same")(
            *several
        )  # of a known state
    except RuntimeError:  # an error of the function itself is reported below
        return one_by_one(function, *several)
    return found


def one_by_one(function: Callable[..., Found], *several: Num[Tensor, "several ..."]) -> Found:
    """The same without `vmap`."""
    found: list[Any] = [function(*each) for each in zip(*several, strict=True)]
    stacked: Any = tree_map(lambda *parts: torch.stack(parts), *found)
    of_its_kind: Found = stacked
    return of_its_kind


def gradient(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]
) -> Float[Tensor, " weight"]:
    """Σ κᵢ∇ℓᵢ."""
    with plain_kernels():
        found: Tensor = grad(partial(summed, batches))(
            weights, torch.cat([batch.shares for batch in batches])
        )
    return found


@dataclass(frozen=True)
class RecordedGradient:
    """The gradient of a step, and the way back through it: γ ↦ (Hγ, γ·∇ℓ₁ … γ·∇ℓ_B)."""

    gradient: Float[Tensor, " weight"]
    back: Callable[[Tensor], tuple[Tensor, Tensor]]

    def curvature(
        self, vectors: Float[Tensor, "vector weight"], together: int | None = None
    ) -> tuple[Float[Tensor, "vector weight"], Float[Tensor, "vector row"]]:
        """H γ for every vector γ, and γ·∇ℓ of every row, the batches one after another, `together` γ at once."""
        with plain_kernels():
            return at_once(self.back, vectors, together=together)


def recorded_gradient(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]
) -> RecordedGradient:
    """Find Σ κᵢ∇ℓᵢ, and remember how; of no batches it is nothing, whatever the weights."""
    if not batches:
        return RecordedGradient(
            torch.zeros_like(weights), lambda vector: (torch.zeros_like(vector), vector[:0])
        )
    shares = torch.cat([batch.shares for batch in batches])
    with plain_kernels():
        found = vjp(grad(partial(summed, batches)), weights, shares)
    return RecordedGradient(found[0], found[1])


def scores(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    vectors: Float[Tensor, "vector weight"],
    together: int | None = None,
) -> Float[Tensor, "vector row"]:
    """γ·∇ℓ of every row, the batches one after another, without H γ."""

    def along(vector: Tensor) -> Tensor:
        found: Tensor = jvp(
            lambda at: torch.cat([batch.losses(at) for batch in batches]), (weights,), (vector,)
        )[1]
        return found

    load_forward_mode()
    with plain_kernels():
        return at_once(along, vectors, together=together)


def row_gradients(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]
) -> Iterator[Float[Tensor, "row weight"]]:
    """∇ℓ of every row by itself, batch by batch."""
    for batch in batches:
        with plain_kernels():
            found: Tensor = jacrev(batch.losses)(weights)
        yield found


@cache
def load_forward_mode() -> None:
    """Let torch load its rules of forward mode, at which it warns of itself."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # the latter since torch 2.15
            warnings.simplefilter("ignore", kind)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def summed(
    batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"], shares: Float[Tensor, " row"]
) -> Float[Tensor, ""]:
    """Σ κᵢℓᵢ."""
    return torch.cat([batch.losses(weights) for batch in batches]) @ shares


# --- Where a gradient is nothing but rounding, and an optimizer divides it by its own size, the derivative of the step
# is 1/eps times too large. Random shares tell the size of the terms without the gradient of any single example:
#
#     Σᵢ (ξᵢκᵢ∇ℓᵢ)² ≈ (Σᵢ ξᵢκᵢ∇ℓᵢ)²,        ξᵢ ~ N(0, 1)


DRAWS = 2  # gradients with random shares: with one alone, a number may be small by chance


def credit_of_rows(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    gradient: Float[Tensor, " weight"],
    flat: FlatWeights,
) -> Float[Tensor, " weight"] | None:
    """Return 0 where the gradient of a step is rounding and 1 elsewhere, or nothing if no element is rounding."""
    shares = torch.cat([batch.shares for batch in batches])
    squares = torch.zeros_like(weights)
    generator = stream("terms", len(shares))
    for _ in range(DRAWS):
        signs = torch.randn(len(shares), generator=generator, dtype=torch.float64).to(shares)
        with plain_kernels():
            drawn: Tensor = grad(partial(summed, batches))(weights, shares * signs)
        squares += drawn.square()
    terms = flat.weights(squares.sqrt())
    sizes = {name: size if size.dim() <= 1 else size.norm() for name, size in terms.items()}
    credited = credit(flat.weights(gradient), sizes)
    if not credited:
        return None
    ones = {name: torch.ones_like(size) for name, size in terms.items()}
    return flat.vector(ones | credited)


# --- Back through clipping, c g with c = min(1, k/(‖g‖ + 1e-6)): what is pulled on c g pulls on g.
#
# γ = c p̂ − k/(‖g‖ + 1e-6)² · (p̂·g)/‖g‖ · g    if it was active,  γ = p̂ otherwise


@dataclass(frozen=True)
class Clipping:
    """The gradient of a step, and the norm to which it was shortened, if it was longer.

    >>> import torch
    >>> Clipping(torch.tensor([3.0, 4.0]), 1.0).back(torch.tensor([[3.0, 4.0], [4.0, -3.0]])).round(decimals=3).tolist()
    [[0.0, 0.0], [0.800000011920929, -0.6000000238418579]]
    """

    gradient: Float[Tensor, " weight"]
    norm: float | None

    @property
    def factor(self) -> float:
        """The c of this gradient."""
        return (
            1.0
            if self.norm is None
            else min(1.0, self.norm / (float(self.gradient.norm()) + GUARD))
        )

    def back(self, pulled: Float[Tensor, "vector weight"]) -> Float[Tensor, "vector weight"]:
        """Take what is pulled on the clipped gradient back to the gradient."""
        if self.norm is None or self.factor == 1.0:
            return pulled
        size = float(self.gradient.norm())
        shortening = self.norm / (size + GUARD) ** 2 / size * (pulled @ self.gradient)
        return self.factor * pulled - shortening[:, None] * self.gradient
