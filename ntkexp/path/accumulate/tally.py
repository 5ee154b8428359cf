"""What one step adds to the contributions of one rule, in a few numbers, and whether it closes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.secant.closure import Closure, bound
from ntkexp.path.points import StepBlock


class Rounding(NamedTuple):
    """What rounds along a path: Σ‖terms of f‖ at its start, and eps of the shortest numbers between weights and f."""

    terms: float
    eps: float


@dataclass
class Tally:
    """Sums over blocks of points."""

    missed: float = 0.0  # ‖Σᵢ Δ𝒮ᵢ − Δf‖²
    changed: float = 0.0  # ‖Δf‖²
    outputs: float = 0.0  # ‖f(θ_{s+1})‖²
    contribution_mass: float = 0.0  # Σ|Δ𝒮|
    contribution_sum: float = 0.0  # Σ_x |Σᵢ Δ𝒮|
    kernel_squares: float = 0.0  # ‖ηK_s‖²
    kernels: bool = True  # whether there are any

    def add(
        self, parts: Float[Tensor, "point out train"], kernel: Float[Tensor, "point out kept out_"]
    ) -> Float[Tensor, "point out"]:
        """Count the contributions and the kernel of a step at some points; the sum of the contributions."""
        summed = parts.sum(2)
        mass, together, squares = fetched(parts.norm(p=1, dim=2).sum(), summed.abs().sum(), kernel.square().sum())
        self.contribution_mass += mass
        self.contribution_sum += together
        self.kernel_squares += squares
        self.kernels = kernel.numel() > 0
        return summed

    def close(self, block: StepBlock, expected: Float[Tensor, "point out"]) -> None:
        """Count how far the change of the outputs is from what it should be."""
        change = block.change()
        found = ((expected - change).square().sum(), change.square().sum(), block.outputs(1.0).square().sum())
        missed, changed, outputs = fetched(*found)
        self.missed += missed
        self.changed += changed
        self.outputs += outputs

    def miss(self, rounding: Rounding) -> Closure | None:
        """How far a secant is from its step, if rounding does not explain it.

        What is summed are contributions, so their size counts as well. Where the outputs themselves are no numbers any
        more the run has diverged, and says so.
        """
        size = rounding.terms + sqrt(self.outputs) + sqrt(self.changed) + self.contribution_mass
        found = Closure(sqrt(self.missed), bound(size, rounding.eps))
        return None if found.holds or not isfinite(self.outputs + self.changed) else found

    @property
    def closure(self) -> float:
        """‖Σᵢ Δ𝒮ᵢ − Δf‖/‖Δf‖."""
        return sqrt(self.missed / self.changed) if self.changed else 0.0

    @property
    def kernel_mass(self) -> float | None:
        """η‖K_s‖, where kernels were made."""
        return sqrt(self.kernel_squares) if self.kernels else None


def fetched(*numbers: Float[Tensor, ""]) -> list[float]:
    """Numbers from a device, which is waited for once.

    >>> fetched(torch.tensor(1.0), torch.tensor(0.5, dtype=torch.float64))
    [1.0, 0.5]
    """
    found: list[float] = torch.stack([number.double() for number in numbers]).tolist()
    return found
