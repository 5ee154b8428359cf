"""How well the parts are known, though their sum is exact.

A secant Jacobian is not the only matrix that closes a step; the one that the parts 𝒮(x, xᵢ) should come from is the
integral of the tangent along it, which the mean over n equal pieces approaches like n⁻². Hence, on a step,

    e = (S_2n − S_n) · 4/3        (4ᵏ⁺¹/(4ᵏ⁺¹ − 1) after k extrapolations)

is the error of S_n. It is measured on m of the T steps, evenly spread, and the size of the whole error is estimated
without bias from their squares and products, since errors of different steps may add up or cancel:

    ‖Σ_s e_s‖² ≈ T/m Σ‖e‖² + T(T−1)/(m(m−1)) (‖Σe‖² − Σ‖e‖²)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.on_disk import blocks, put_back, take
from ntkexp.path.accumulate.integrals import contract
from ntkexp.path.points import StepBlock
from ntkexp.path.rule.base import Piece
from ntkexp.path.step import Step


@dataclass(kw_only=True)
class ErrorBar:
    """Accumulates the error of the parts on a sample of steps; `gain` is the factor in front of the difference."""

    rule: str  # whose error is measured
    coarse: tuple[Piece, ...]
    fine: tuple[Piece, ...]
    gain: float
    every: int
    total: Float[Tensor, "probe out train"]
    makes_kernels: bool = True
    squares: float = 0.0

    def measures(self, step: int) -> bool:
        """Whether the step is one of the sample."""
        return step % self.every == self.every // 2

    def add(self, step: Step, block: StepBlock) -> None:
        """Measure a step of the sample at one block of points."""
        side = step.side if self.makes_kernels else step.pulled_side
        difference = block.kernel(self.fine, side) - block.kernel(self.coarse, side)
        error = contract(difference, step.output_gradient) if self.makes_kernels else difference.squeeze(3)
        error = error.mul_(step.step_size * self.gain)
        self.total[block.rows].add_(error)
        put_back(self.total)
        self.squares += float(error.square().sum())

    def collect(self, error: Float[Tensor, "probe out train"]) -> None:
        """Take in the error of a whole step of the sample, NaN where the path is not read."""
        self.total.add_(error.nan_to_num())
        self.squares += float(error.nan_to_num().square().sum())

    def estimate(self, steps: int) -> float:
        """‖𝒮 − 𝒮_integral‖ after so many steps, or NaN if none of them was measured."""
        m = sum(map(self.measures, range(steps)))
        if m == 0:
            return float("nan")
        together = sum(float(block.square().sum()) for block in blocks(self.total))
        alone = steps / m * self.squares
        if m == 1:
            return sqrt(steps * alone)
        crossed = steps * (steps - 1) / (m * (m - 1)) * (together - self.squares)
        return sqrt(max(alone + crossed, alone / steps))

    @property
    def state(self) -> dict[str, Tensor]:
        """The accumulators, for a checkpoint."""
        return {"total": self.total, "squares": torch.tensor(self.squares, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the accumulators of a checkpoint."""
        take(self.total, state["total"])
        self.squares = float(state["squares"])
