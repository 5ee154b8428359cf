"""The secant of a batch's gradient between two weights: a matrix H̄ with H̄ δ = g(θ′) − g(θ), δ = θ′ − θ.

    H̄ = H + r δᵀ/‖δ‖²,        r = g(θ′) − g(θ) − H δ,        H at the midpoint (Broyden 1965)

Transposed and applied to γ it is Hγ + δ (r·γ)/‖δ‖², since H is symmetric; r·γ needs no Hδ, as (Hδ)·γ = δ·(Hγ).
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.removal.gradient import curved, gradient, output_gradients
from ntkexp.removal.pair import Pair
from ntkexp.removal.rerun import Rerun


def secant_curved(
    rerun: Rerun,
    weights: Pair,
    share: Float[Tensor, " row"],
    rows: Int[Tensor, " row"],
    directions: Float[Tensor, "direction weight"],
) -> Float[Tensor, "direction weight"]:
    """Find H̄ᵀγ for several directions γ; where both weights are the same, H is no secant."""
    found = curved(rerun, weights.mean, share, rows, directions)
    if not weights.differs:
        return found
    before, after = (gradient(rerun, end, share, rows) for end in weights)
    missed = directions @ (after - before) - found @ weights.change
    return found + along(missed, weights.change)


def secant_outputs(
    rerun: Rerun, weights: Pair, inputs: Tensor, chosen: Int[Tensor, "chosen 2"]
) -> Float[Tensor, "chosen weight"]:
    """Find the secant Jacobian of chosen outputs between two weights: the mean of both ends, set right along δ."""
    first, second = (output_gradients(rerun, end, inputs, chosen) for end in weights)
    if not weights.differs:
        return first
    before, after = (rerun.outputs(end, inputs)[chosen[:, 0], chosen[:, 1]] for end in weights)
    found = (first + second) / 2
    return found + along(after - before - found @ weights.change, weights.change)


def along(missed: Float[Tensor, " direction"], change: Float[Tensor, " weight"]) -> Float[Tensor, "direction weight"]:
    """The smallest matrix that makes up for what is missed along a change."""
    return missed[:, None] * change / (change @ change)
