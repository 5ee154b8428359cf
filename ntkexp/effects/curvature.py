"""What the gradient of a step makes of its examples, and of the weights: γ·∇ℓᵢ for every row, and H γ, in one pass.

    (Hγ, γ·∇ℓ₁ … γ·∇ℓ_B) = tangent of (Σ κᵢ∇ℓᵢ, ℓ₁ … ℓ_B) along γ

Forward over reverse (Pearlmutter 1994): no gradient of a single example is made. Several γ go together, in chunks.

>>> square = TakenBatch(
...     examples=torch.tensor([0]), shares=torch.tensor([0.5]), losses=lambda weights: weights.square().sum()[None]
... )
>>> curved, along = curvature((square,), torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0]]))
>>> curved.tolist(), along.tolist()
([[1.0, 1.0]], [[6.0]])
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from ntkexp.effects.trajectory import TakenBatch
from ntkexp.kernel.record.taping import plain_kernels


def gradient(batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]) -> Float[Tensor, " weight"]:
    """Σ κᵢ∇ℓᵢ."""
    with plain_kernels():
        found: Tensor = grad(partial(summed, batches), has_aux=True)(weights)[0]
    return found


def curvature(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    vectors: Float[Tensor, "vector weight"],
    together: int | None = None,
) -> tuple[Float[Tensor, "vector weight"], Float[Tensor, "vector row"]]:
    """H γ for every vector γ, and γ·∇ℓ of every row, the batches one after another; so many γ go together."""
    reverse = grad(partial(summed, batches), has_aux=True)

    def along(vector: Tensor) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = jvp(reverse, (weights,), (vector,))[1]
        return both

    load_forward_mode()
    with plain_kernels():
        found: tuple[Tensor, Tensor] = vmap(along, chunk_size=together, randomness="same")(vectors)  # of a known state
    return found


def scores(
    batches: Sequence[TakenBatch],
    weights: Float[Tensor, " weight"],
    vectors: Float[Tensor, "vector weight"],
    together: int | None = None,
) -> Float[Tensor, "vector row"]:
    """γ·∇ℓ of every row, the batches one after another, without H γ."""

    def along(vector: Tensor) -> Tensor:
        found: Tensor = jvp(lambda at: torch.cat([batch.losses(at) for batch in batches]), (weights,), (vector,))[1]
        return found

    load_forward_mode()
    with plain_kernels():
        found: Tensor = vmap(along, chunk_size=together, randomness="same")(vectors)  # of a known state
    return found


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
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def summed(batches: Sequence[TakenBatch], weights: Float[Tensor, " weight"]) -> tuple[Tensor, Tensor]:
    """Σ κᵢℓᵢ, and the losses themselves."""
    losses = [batch.losses(weights) for batch in batches]
    total = sum((each @ batch.shares for each, batch in zip(losses, batches, strict=True)), start=weights.new_zeros(()))
    return total, torch.cat(losses)
