"""Back through clipping, c g with c = min(1, k/(‖g‖ + 1e-6)): what is pulled on c g pulls on g.

γ = c p̂ − k/(‖g‖ + 1e-6)² · (p̂·g)/‖g‖ · g    if it was active,  γ = p̂ otherwise
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.optimizer.base import GUARD


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
        return 1.0 if self.norm is None else min(1.0, self.norm / (float(self.gradient.norm()) + GUARD))

    def back(self, pulled: Float[Tensor, "vector weight"]) -> Float[Tensor, "vector weight"]:
        """Take what is pulled on the clipped gradient back to the gradient."""
        if self.norm is None or self.factor == 1.0:
            return pulled
        size = float(self.gradient.norm())
        shortening = self.norm / (size + GUARD) ** 2 / size * (pulled @ self.gradient)
        return self.factor * pulled - shortening[:, None] * self.gradient
