"""σ(z) = z², with κ = q₁q₂ + 2c² and κ̇ = 4c."""

from __future__ import annotations

from torch import Tensor

from ntkexp.layer import AbstractPointwise


class Parabola(AbstractPointwise):
    """A layer with a limit, and without a fused form."""

    def apply(self, z: Tensor) -> Tensor:
        return z * z

    def dual(self, q1: Tensor, c: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        return q1 * q2 + 2 * c * c, 4 * c
