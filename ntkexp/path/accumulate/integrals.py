"""The two integrals along a path, accumulated step by step without keeping the trajectory:

    path kernel     𝒦(x, xᵢ) = Σ_s η_s K_s(x, xᵢ)            [probe, out, train, out_]
    contributions   𝒮(x, xᵢ) = −Σ_s η_s K_s(x, xᵢ) ℓ′ᵢ(s)     [probe, out, train]
    decay           𝒟(x) = −Σ_s λη_s J_s(x)·θ_s               [probe, out]

so that f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x) to the accuracy with which the rule reads a step; exactly, for secants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.on_disk import put_back, take
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.domain import Domain
from ntkexp.path.points import StepBlock
from ntkexp.path.rule.base import Piece
from ntkexp.path.step import Step


@dataclass(frozen=True)
class Integrals:
    """𝒦 and 𝒮 by one rule; a 𝒦 without training examples is not accumulated, nor is any kernel made."""

    pieces: tuple[Piece, ...]
    kernel: Float[Tensor, "probe out kept out_"]  # of all training examples, or of none
    contributions: Float[Tensor, "probe out train"]
    decay: Float[Tensor, "probe out"]

    def add(self, step: Step, block: StepBlock, tally: Tally) -> Float[Tensor, "chosen out"]:
        """Accumulate one step at one block of points, and take its measure; all that came of it there."""
        kernel, parts, shrunk = self.take(step, block)
        together = tally.add(parts, kernel) - shrunk
        tally.close(block, together)
        return together

    def take(self, step: Step, block: StepBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Accumulate one step at one block of points; what it adds to 𝒦 and 𝒮, and takes from 𝒟."""
        if not self.kernel.shape[2]:
            return self.take_parts(step, block)
        kernel, shrunk = block.kernel_and_pull(self.pieces, step.side, step.decay)
        kernel.mul_(step.step_size)
        parts = contract(kernel, step.output_gradient).neg_()
        self.kernel[block.rows].add_(kernel)
        self.contributions[block.rows].add_(parts)
        self.decay[block.rows].sub_(shrunk)
        return kernel, parts, shrunk

    def take_parts(self, step: Step, block: StepBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Accumulate contributions alone, as kernels with the examples' gradients."""
        parts, shrunk = block.kernel_and_pull(self.pieces, step.pulled_side, step.decay)
        parts = parts.squeeze(3).mul_(-step.step_size)
        self.contributions[block.rows].add_(parts)
        put_back(self.contributions)
        self.decay[block.rows].sub_(shrunk)
        return self.kernel[block.rows], parts, shrunk

    def at_zero(self) -> Integrals:
        """The same, at zero."""
        return Integrals(self.pieces, *(torch.zeros_like(part) for part in self.parts))

    def together(self) -> Float[Tensor, "probe out"]:
        """Σᵢ 𝒮(x, xᵢ) + 𝒟(x)."""
        return self.contributions.sum(2) + self.decay

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
            take(value, state[name])


def integrals_at_zero(pieces: tuple[Piece, ...], domain: Domain) -> Integrals:
    """Room for the integrals by the rule of these pieces; NaN at points where the path is not integrated."""
    return Integrals(pieces, domain.kernel_room(), domain.room(3), domain.room(2))


def contract(
    kernel: Float[Tensor, "probe out train out_"], output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out train"]:
    """K ℓ′, a sum over the training side's outputs."""
    return torch.einsum("qcnd,nd->qcn", kernel, output_gradient)
