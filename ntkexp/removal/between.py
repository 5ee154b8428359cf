"""The ledger between two trainings that were recorded, whoever trained: with all examples, and with some left out.

    F(B) − F(A) = Σᵢ sᵢ,        sᵢ = Σ_s  c̄ γ_s·∇ℓ̄ᵢ Δtᵢ + (Σⱼ t̄ⱼ γ_s·∇ℓ̄ⱼ) Δc/ΔW Δtᵢ

γ_s is what a change of the gradient of step s does to the output F in the end, by difference rules that go backwards
from it; ∇ℓ̄ᵢ is the mean of both ends, tᵢ = κᵢwᵢ the share of the example in its batch times its weight, c(W) what makes
these a mean: 1/W where it is renormalised, with W = Σt/Σκ; 1 where not, or where nothing is left of a batch. For two
trainings that hardly differ the rules are derivatives, and sᵢ is the effect of i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.adjoint import Adjoint
from ntkexp.effects.curvature import gradient, recorded_gradient, scores
from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.trajectory import AbstractTrajectory, TakenBatch
from ntkexp.mistake import Mistake
from ntkexp.removal.ledger import Ledger
from ntkexp.removal.mean_step import StepPair
from ntkexp.removal.pair import CLOSE, Pair
from ntkexp.removal.secant import secant

SAME_SHARES = 1e-4  # of what comes back in float32, relative to it

Jacobian = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Weights ↦ the chosen outputs, and their gradients, a row each."""


@dataclass(kw_only=True)
class TrainingPair:
    """Two trainings that differ in the weights of their examples; before the step `begun` they do not."""

    first: AbstractTrajectory
    second: AbstractTrajectory
    weights: Pair  # of the examples
    mean: AbstractMean
    together: int | None = None  # vectors in one pass; None: all
    begun: int = 0
    emptied: int = 0  # steps of whose calls nothing was left, as far as was seen

    def ledger(self, outputs: Jacobian, tell: Callable[[int], None]) -> Ledger:
        """Split the change of the outputs. The number of steps back is told."""
        ends = Pair(self.first.end, self.second.end)
        (before, slopes), (after, others) = map(outputs, ends)
        adjoint = Adjoint(weights=secant((slopes + others) / 2, after - before, ends.change))
        shares = slopes.new_zeros(len(slopes), self.first.examples)
        by_step = slopes.new_zeros(len(slopes), self.first.length)
        magnitude = before.abs() + after.abs() + adjoint.weights.norm(dim=1) * ends.mean.norm()
        self.emptied = 0
        size = largest = float(adjoint.weights.norm(dim=1).mean())
        for index in reversed(range(self.begun, self.first.length)):
            by_step[:, index] = self.take(index, adjoint, shares, magnitude)
            largest = max(largest, float(adjoint.weights.norm(dim=1).mean()))
            tell(self.first.length - index)
        return Ledger(
            before=before,
            actual=after - before,
            shares=shares,
            by_step=by_step,
            magnitude=magnitude,
            growth=largest / size if size else 1.0,
        )

    def take(
        self, index: int, adjoint: Adjoint, shares: Float[Tensor, "vector example"], magnitude: Float[Tensor, " vector"]
    ) -> Float[Tensor, " vector"]:
        """Take one step back, and add up what examples did in it; what all of them did."""
        pair = StepPair(first=self.first.step(index), second=self.second.step(index))
        pulled = pair.clipped.back(adjoint.back(pair.mean, pair.clipped.taken.mean))
        done = shares.new_zeros(len(shares))
        if pair.first.batches:
            magnitude += self.curve(pair, adjoint, pulled)
            done += self.split(pair, pulled, shares)
        magnitude += adjoint.weights.abs() @ pair.weights.mean.abs()
        return done

    def curve(
        self, pair: StepPair, adjoint: Adjoint, pulled: Float[Tensor, "vector weight"]
    ) -> Float[Tensor, " vector"]:
        """Take the secant of the gradient between both weights, with the mean of both shares, back to them; the
        magnitudes of that gradient, and of what examples add to it."""
        batches = tuple(self.averaged(pair, k) for k in range(len(pair.first.batches)))
        curved, rows = recorded_gradient(batches, pair.weights.mean).curvature(pulled, self.together)
        ends = Pair(*(gradient(batches, end) for end in pair.weights))
        adjoint.weights += secant(curved, pulled @ ends.change, pair.weights.change)
        added = torch.cat([batch.shares for batch in batches]).abs()
        return pulled.abs() @ ends.mean.abs() + rows.abs() @ added

    def averaged(self, pair: StepPair, place: int) -> TakenBatch:
        """A batch with the mean of the shares that its rows had in both trainings."""
        one, other = pair.first.batches[place], pair.second.batches[place]
        if not torch.equal(one.examples, other.examples) or self.other_shares(one, other):
            raise Mistake(
                f"step {pair.first.index}: without the examples, a call of others or with another loss came back; "
                "nothing in the loop should depend on what it has learned but its weights"
            )
        return replace(one, shares=(one.shares + other.shares) / 2)

    def other_shares(self, one: TakenBatch, other: TakenBatch) -> bool:
        """Whether shares differ otherwise than by weights of examples, and by what makes a mean of them."""
        alike = replace(one, shares=one.by_weight)
        ours, theirs = (self.mean.shares(alike, at[one.examples][None])[0] for at in self.weights)
        if not ours.any():
            return False
        expected = theirs * (one.shares.sum() / ours.sum())
        return float((expected - other.shares).abs().max()) > SAME_SHARES * float(expected.abs().max())

    def split(
        self, pair: StepPair, pulled: Float[Tensor, "vector weight"], shares: Float[Tensor, "vector example"]
    ) -> Float[Tensor, " vector"]:
        """Add up what examples did by weighing less in one training; what all of them did."""
        batches = list(zip(pair.first.batches, pair.second.batches, strict=True))
        weights = [Pair(*(at[one.examples] for at in self.weights)) for one, _ in batches]
        self.emptied += not any(bool(weight.second.any()) for weight in weights)
        if not any(weight.differs for weight in weights):
            return shares.new_zeros(len(shares))
        ends = (scores(pair.first.batches, end, pulled, self.together) for end in pair.weights)
        rows = torch.split(Pair(*ends).mean, [len(one.examples) for one, _ in batches], dim=1)
        each = zip(batches, weights, rows, strict=True)
        found = [parts(one, other, weight, along) for (one, other), weight, along in each]
        for part, (one, _) in zip(found, batches, strict=True):
            shares.index_add_(1, one.examples, part)
        return torch.cat(found, dim=1).sum(1)


def parts(
    one: TakenBatch, other: TakenBatch, weight: Pair, rows: Float[Tensor, "vector row"]
) -> Float[Tensor, "vector row"]:
    """What the rows of a batch did, of which these weights are those of their examples."""
    each = Pair(one.by_weight, other.by_weight)
    if not weight.first.any() or not weight.second.any():  # no mean of nothing: the other's
        each = Pair(*[other.by_weight if weight.second.any() else one.by_weight] * 2)
    changed = each.mean * weight.change
    whole, others = changed.sum(), rows @ (weight.mean * each.change)
    if whole.abs() <= CLOSE * changed.abs().sum():  # as many came as went, and the mean is one over as much
        return rows * changed
    return (rows + others[:, None] / whole) * changed
