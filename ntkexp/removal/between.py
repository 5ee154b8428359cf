"""The ledger between two trainings that were recorded, whoever trained: with all examples, and with some left out.

    F(B) − F(A) = Σᵢ sᵢ,        sᵢ = Σ_s κᵢΔwᵢ (c̄ γ_s·∇ℓ̄ᵢ + Δc/ΔW Σⱼ κⱼw̄ⱼ γ_s·∇ℓ̄ⱼ/Σκ),        W = Σκw/Σκ

as in `removal.ledger`, with the share κᵢ of example i in its batch when all weigh 1, and c(W) = 1/W where a mean is
renormalised, 1 where it is not, or where nothing is left of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.adjoint import Adjoint
from ntkexp.effects.curvature import curvature, gradient, scores
from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.trajectory import AbstractTrajectory, TakenBatch
from ntkexp.mistake import Mistake
from ntkexp.removal.curvature import along
from ntkexp.removal.ledger import Ledger
from ntkexp.removal.mean_step import StepPair
from ntkexp.removal.pair import Pair

SAME_SHARES = 1e-4  # of what comes back in float32, relative to it

Jacobian = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Weights ↦ the chosen outputs, and their gradients, a row each."""


@dataclass(kw_only=True)
class TrainingPair:
    """Two trainings; in the second, examples have the weights `left`, and all of them 1 in the first."""

    first: AbstractTrajectory
    second: AbstractTrajectory
    left: Float[Tensor, " example"]
    mean: AbstractMean
    together: int | None = None  # vectors in one pass; None: all
    emptied: int = 0  # steps of whose calls nothing was left, as far as was seen

    def ledger(self, outputs: Jacobian, tell: Callable[[int], None]) -> Ledger:
        """Split the change of the outputs. The number of steps back is told."""
        ends = Pair(self.first.end, self.second.end)
        (before, slopes), (after, others) = map(outputs, ends)
        found = (slopes + others) / 2
        if ends.differs:
            found = found + along(after - before - found @ ends.change, ends.change)
        adjoint = Adjoint(weights=found)
        shares = found.new_zeros(len(found), self.first.examples)
        by_step = found.new_zeros(len(found), self.first.length)
        self.emptied = 0
        size = largest = float(found.norm(dim=1).mean())
        for index in reversed(range(self.first.length)):
            by_step[:, index] = self.take(index, adjoint, shares)
            largest = max(largest, float(adjoint.weights.norm(dim=1).mean()))
            tell(self.first.length - index)
        growth = largest / size if size else 1.0
        return Ledger(before=before, actual=after - before, shares=shares, by_step=by_step, growth=growth)

    def take(self, index: int, adjoint: Adjoint, shares: Float[Tensor, "vector example"]) -> Float[Tensor, " vector"]:
        """Take one step back, and add up what examples did in it; what all of them did."""
        pair = StepPair(first=self.first.step(index), second=self.second.step(index))
        pulled = pair.clipped.back(adjoint.back(pair.mean, pair.clipped.taken.mean))
        done = shares.new_zeros(len(shares))
        if not pair.first.batches:
            return done
        adjoint.weights += self.curved(pair, pulled)
        self.emptied += not any(bool(self.left[batch.examples].any()) for batch in pair.first.batches)
        changed = [bool((self.left[batch.examples] != 1).any()) for batch in pair.first.batches]
        if not any(changed):
            return done
        ends = (scores(pair.first.batches, end, pulled, self.together) for end in pair.weights)
        rows = torch.split(Pair(*ends).mean, [len(batch.examples) for batch in pair.first.batches], dim=1)
        for along_rows, batch in zip(rows, pair.first.batches, strict=True):
            found = self.parts(batch, along_rows)
            shares.index_add_(1, batch.examples, found)
            done += found.sum(1)
        return done

    def curved(self, pair: StepPair, pulled: Float[Tensor, "vector weight"]) -> Float[Tensor, "vector weight"]:
        """The secant of the gradient between both weights, with the mean of both shares, taken back."""
        batches = tuple(self.averaged(pair, k) for k in range(len(pair.first.batches)))
        found, _ = curvature(batches, pair.weights.mean, pulled, self.together)
        if not pair.weights.differs:
            return found
        change = gradient(batches, pair.weights.second) - gradient(batches, pair.weights.first)
        return found + along(pulled @ change - found @ pair.weights.change, pair.weights.change)

    def averaged(self, pair: StepPair, place: int) -> TakenBatch:
        """A batch with the mean of the shares that its rows had in both trainings."""
        one, other = pair.first.batches[place], pair.second.batches[place]
        expected = self.mean.shares(one, self.left[one.examples][None])[0]
        missed = float((expected - other.shares).abs().max())
        if not torch.equal(one.examples, other.examples) or missed > SAME_SHARES * float(one.shares.abs().max()):
            raise Mistake(
                f"step {pair.first.index}: without the examples, a call of others or with another loss came back; "
                "nothing in the loop should depend on what it has learned but its weights"
            )
        return replace(one, shares=(one.shares + other.shares) / 2)

    def parts(self, batch: TakenBatch, rows: Float[Tensor, "vector row"]) -> Float[Tensor, "vector row"]:
        """What the rows of a batch did by weighing less in one training."""
        left, kappa = self.left[batch.examples], batch.shares
        whole, kept = float(kappa.sum()), float(kappa @ left)
        factor = float(self.mean.shares(batch, left[None]).sum()) / kept if kept else 1.0
        rate = (factor - 1) / (kept / whole - 1) if kept != whole else 0.0
        others = rows @ (kappa * (1 + left) / 2) * (rate / whole)
        return ((1 + factor) / 2 * rows + others[:, None]) * (kappa * (left - 1))
