"""A matrix of slopes is made a secant between two weights: the smallest change of it that is right along their change.

    J̄ = J + (Δf − J δ) δᵀ/‖δ‖²,        δ = θ′ − θ        J̄ δ = Δf        (Broyden 1965)

The gradient of a batch has the Hessian H at the midpoint for J. What is taken back is Hγ, and H is symmetric, so that
γ·(Hδ) = δ·(Hγ): rows γᵀH are set right as rows of any other matrix.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def secant(
    slopes: Float[Tensor, "row weight"], value: Float[Tensor, " row"], change: Float[Tensor, " weight"]
) -> Float[Tensor, "row weight"]:
    """Rows that make `value` of `change`; the slopes themselves where nothing changed.

    >>> from torch import tensor
    >>> secant(tensor([[1.0, 0.0]]), tensor([3.0]), tensor([1.0, 1.0]))
    tensor([[2., 1.]])
    """
    return slopes + along(value - slopes @ change, change) if change.any() else slopes


def along(missed: Float[Tensor, " row"], change: Float[Tensor, " weight"]) -> Float[Tensor, "row weight"]:
    """The smallest matrix that makes up for what is missed along a change."""
    return missed[:, None] * change / (change @ change)
