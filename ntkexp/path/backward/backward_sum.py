"""The sum backwards, for optimizers with memory: from the last step to the first, one bracket U for each output.

    path kernel     𝒦(x, xᵢ) = Σ_r ⟨V_r(x), Jᵢ(r)⟩            [probe, out, train, out_]
    contributions   𝒮(x, xᵢ) = −Σ_r ⟨V_r(x), Jᵢ(r)⟩ ℓ′ᵢ(r)     [probe, out, train]
    decay           𝒟(x)     = −Σ_r λ V_r(x)·θ_r, or −Σ_r λ (η_r ⊙ J̄(r))·θ_r where it passes the memory by

with U and V as in `optimizer.base`. Then f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x), exactly, for secants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ntkexp.kernel.features.bracket import Bracket, empty
from ntkexp.kernel.features.features import Features
from ntkexp.optimizer.base import Recursion
from ntkexp.path.accumulate.integrals import Integrals, contract
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.points import StepBlock
from ntkexp.path.right_side import ExactSide
from ntkexp.path.step import Step, decay, sizes_of
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class StepBack:
    """One step, seen from its end: how it enters the sum, and whether weights decay past the memory."""

    step: Step
    recursion: Recursion
    decouples: bool

    @property
    def through_memory(self) -> Weights | None:
        """λθ_r, which the gradient holds."""
        weights = self.step.view.weights
        return None if self.decouples else decay(weights, self.step.weight_decay, sizes_of(weights, {}, 1.0))

    @property
    def past_memory(self) -> Weights | None:
        """λη_r ⊙ θ_r, which the weights lose by themselves."""
        return self.step.decay if self.decouples else None


@dataclass(kw_only=True)
class BackwardSum:
    """The sum by one rule, at some of the points: `place` says which of those that `integrals` is about.

    The bracket is made when the first features are seen, and filled with `saved`, if there is a checkpoint.
    """

    integrals: Integrals
    place: Int[Tensor, " probe"]
    saved: list[Tensor]
    bracket: Bracket | None = None

    def add(self, back: StepBack, block: StepBlock, tally: Tally) -> tuple[Tensor, Tensor]:
        """Take one step back; what its gradients contributed [probe, out, train], and what decay took away."""
        kernel, lost = self.take(back, block, tally)
        bracket, past = self.bracket, back.recursion.past
        assert bracket is not None
        kernel = kernel + past * torch.cat([bracket.kernel(part) for part in back.step.right], dim=2)
        if (shrinking := back.through_memory) is not None:
            lost = lost + past * bracket.applied(shrinking)
        parts = contract(kernel, back.step.output_gradient).neg_()
        tally.add(parts, kernel)
        self.integrals.kernel[self.place] += kernel
        self.integrals.contributions[self.place] += parts
        self.integrals.decay[self.place] -= lost
        return parts, lost

    def take(self, back: StepBack, block: StepBlock, tally: Tally) -> tuple[Tensor, Tensor]:
        """Let U take in J̄(r); what `now` ⊙ J̄(r) adds to the kernel, and to the decay."""
        pushed = torch.zeros_like(block.change())
        step, recursion, carry = back.step, back.recursion, back.recursion.carry
        kernel, lost = step.output_gradient.new_zeros(()), step.output_gradient.new_zeros(())
        for piece in self.integrals.pieces:
            features = block.features(piece)
            self.bracket = self.bracket or self.bracket_before(features)
            self.bracket.take(features, {name: piece.weight * part for name, part in recursion.scale.items()}, carry)
            carry = 1.0
            pushed.add_(features.applied(step.segment.difference), alpha=piece.weight)
            if recursion.now is not None:
                ahead = features.scaled(recursion.now)
                kernel = kernel + piece.weight * ExactSide(step.right).between(ahead)
                if (shrinking := back.through_memory) is not None:
                    lost = lost + piece.weight * ahead.applied(shrinking)
            if (shrinking := back.past_memory) is not None:
                lost = lost + piece.weight * features.applied(shrinking)
        tally.close(block, pushed)
        return kernel, lost

    def bracket_before(self, features: Features) -> Bracket:
        """The bracket before this step."""
        bracket = empty(features)
        for part, total in zip(bracket.parts.values(), self.saved, strict=False):
            part.total.copy_(total)
        return bracket

    @property
    def state(self) -> list[Tensor]:
        """The bracket, for a checkpoint."""
        return [part.total for part in self.bracket.parts.values()] if self.bracket else self.saved
