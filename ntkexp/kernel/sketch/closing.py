"""The kernel of two sketches, and how a sketched step still closes.

Along plain (stochastic) gradient descent the contributions −η K̄ℓ′ of a step sum to the change of the network, for
Σᵢ J(xᵢ)ᵀℓ′ᵢ = g is the way the weights go. A sketch misses that by its error. So weight space is split into the
direction ĝ = g/‖g‖, which is treated exactly, and all that is orthogonal to it, which is sketched:

    K̂ = (J̄ĝ)(Jĝ)ᵀ + (J̄S − J̄ĝ·ĝᵀS)(JS − Jĝ·ĝᵀS)ᵀ

It has no bias either, and K̂ℓ′ sums to J̄g whatever S is, for (JS − Jĝ·ĝᵀS)ᵀℓ′ = Sᵀg − Sᵀĝ‖g‖ = 0. With a memory, as of
Adam, the contributions of a step are of gradients of other steps, which do not lie in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sketched:
    """J S of some points and, where a direction is treated apart, J ĝ."""

    rows: Float[Tensor, "example out size"]
    along: Float[Tensor, "example out"] | None = None

    def apart(self, along: Float[Tensor, "example out"], direction: Float[Tensor, " size"]) -> Sketched:
        """Treat Jĝ apart, given the sketch of ĝ."""
        return Sketched(self.rows - along[:, :, None] * direction, along)


def sketched_gram(left: Sketched, right: Sketched) -> Float[Tensor, "probe out train out_"]:
    """K̂ of two sketches."""
    found = torch.einsum("qck,ndk->qcnd", left.rows, right.rows)
    if left.along is None or right.along is None:
        return found
    return found.add_(left.along[:, :, None, None] * right.along)
