"""The gradient of a batch, of many runs at once.

g(θ, κ) = Jᵀ(κ ⊙ ℓ′)
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vjp

from ntkexp.effects.together import at_once
from ntkexp.removal.rerun import Rerun

AT_ONCE = 16
"""How many runs are taken through the network together: more would not be faster."""


def gradient(
    rerun: Rerun, weights: Float[Tensor, " weight"], share: Float[Tensor, " row"], rows: Int[Tensor, " row"]
) -> Float[Tensor, " weight"]:
    """Find g(θ), given κ of the examples in these rows."""
    inputs, targets = rerun.inputs[rows], rerun.targets[rows]
    outputs, pull = vjp(lambda vector: rerun.outputs(vector, inputs), weights)[:2]
    found: Tensor = pull(share[:, None] * rerun.loss.output_gradient(outputs, targets))[0]
    return found


def gradients(
    rerun: Rerun, weights: Float[Tensor, "run weight"], share: Float[Tensor, "run row"], rows: Int[Tensor, " row"]
) -> Float[Tensor, "run weight"]:
    """Find g(θ) of several runs."""
    return at_once(lambda one, of: gradient(rerun, one, of, rows), weights, share, together=AT_ONCE)
