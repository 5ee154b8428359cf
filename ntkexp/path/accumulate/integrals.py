"""The two integrals along a path, accumulated step by step without keeping the trajectory:

    path kernel     𝒦(x, xᵢ) = Σ_s η_s K_s(x, xᵢ)            [probe, out, train, out_]
    contributions   𝒮(x, xᵢ) = −Σ_s η_s K_s(x, xᵢ) ℓ′ᵢ(s)     [probe, out, train]
    decay           𝒟(x) = −Σ_s λη_s J_s(x)·θ_s               [probe, out]

so that f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x) to the accuracy with which the rule reads a step; exactly, for secants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.secant.closure import Closure, bound
from ntkexp.path.descent import Step
from ntkexp.path.points import Block
from ntkexp.path.rule.base import Piece


@dataclass
class Tally:
    """What one step adds to the contributions of one rule, in a few numbers, summed over blocks of points."""

    missed: float = 0.0  # ‖Σᵢ Δ𝒮ᵢ − Δf‖²
    changed: float = 0.0  # ‖Δf‖²
    outputs: float = 0.0  # ‖f(θ_{s+1})‖²
    contribution_mass: float = 0.0  # Σ|Δ𝒮|
    contribution_sum: float = 0.0  # Σ_x |Σᵢ Δ𝒮|
    kernel_squares: float = 0.0  # ‖ηK_s‖²

    def add(
        self, parts: Float[Tensor, "point out train"], kernel: Float[Tensor, "point out train out_"]
    ) -> Float[Tensor, "point out"]:
        """Count the contributions and the kernel of a step at some points; the sum of the contributions."""
        summed = parts.sum(2)
        self.contribution_mass += float(parts.abs().sum())
        self.contribution_sum += float(summed.abs().sum())
        self.kernel_squares += float(kernel.square().sum())
        return summed

    def close(self, block: Block, expected: Float[Tensor, "point out"]) -> None:
        """Count how far the change of the outputs is from what it should be."""
        change = block.change()
        self.missed += float((expected - change).square().sum())
        self.changed += float(change.square().sum())
        self.outputs += float(block.outputs(1.0).square().sum())

    def unclosed(self, terms: float, eps: float) -> Closure | None:
        """How far a secant is from its step, if rounding does not explain it; `terms` is the size of what f is made of.

        What is summed are contributions, so their size counts as well. Where the outputs themselves are no numbers any
        more the run has diverged, and says so.
        """
        size = terms + sqrt(self.outputs) + sqrt(self.changed) + self.contribution_mass
        found = Closure(sqrt(self.missed), bound(size, eps))
        return None if found.holds or not isfinite(self.outputs + self.changed) else found

    @property
    def closure(self) -> float:
        """‖Σᵢ Δ𝒮ᵢ − Δf‖/‖Δf‖."""
        return sqrt(self.missed / self.changed) if self.changed else 0.0

    @property
    def kernel_mass(self) -> float:
        """η‖K_s‖."""
        return sqrt(self.kernel_squares)


@dataclass(frozen=True)
class Integrals:
    """𝒦 and 𝒮 by one rule."""

    pieces: tuple[Piece, ...]
    kernel: Float[Tensor, "probe out train out_"]
    contributions: Float[Tensor, "probe out train"]
    decay: Float[Tensor, "probe out"]

    def add(self, step: Step, block: Block, tally: Tally) -> None:
        """Accumulate one step at one block of points, and take its measure."""
        kernel, parts, shrunk = self.take(step, block)
        tally.close(block, tally.add(parts, kernel) - shrunk)

    def take(self, step: Step, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Accumulate one step at one block of points; what it adds to 𝒦 and 𝒮, and takes from 𝒟."""
        kernel, shrunk = block.integrated(self.pieces, step.steered, step.decay)
        kernel.mul_(step.step_size)
        parts = contracted(kernel, step.output_gradient).neg_()
        self.kernel[block.place].add_(kernel)
        self.contributions[block.place].add_(parts)
        self.decay[block.place].sub_(shrunk)
        return kernel, parts, shrunk

    def emptied(self) -> Integrals:
        """The same, at zero."""
        return Integrals(self.pieces, *(torch.zeros_like(part) for part in self.parts))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """𝒦, 𝒮 and 𝒟."""
        return self.kernel, self.contributions, self.decay

    @property
    def state(self) -> dict[str, Tensor]:
        """The accumulators, for a checkpoint."""
        return dict(zip(("kernel", "contributions", "decay"), self.parts, strict=True))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the accumulators of a checkpoint."""
        for name, value in self.state.items():
            value.copy_(state[name])


def contracted(
    kernel: Float[Tensor, "probe out train out_"], output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out train"]:
    """K ℓ′, a sum over the training side's outputs."""
    return torch.einsum("qcnd,nd->qcn", kernel, output_gradient)
