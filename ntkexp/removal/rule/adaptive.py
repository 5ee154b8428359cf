"""Steps of Adam, AdamW and AMSGrad. With u = √v, n = u/√(1 − β₂ˢ⁺¹) + ε and m = r n, so that the step is along r:

    Δr = (Δm − r̄ Δn)/n̄        Δu = (β₂ (u + u′)₋ Δu₋ + (1 − β₂)(p + p′) Δp)/(u + u′)        0 where u + u′ = 0

₋ is before the step. The obvious rule for m D with D = 1/n closes in algebra and loses everything in floats: where a
unit is dead in one training only, its D is 1/ε there and the slopes of D cancel numbers beyond any rounding.
AMSGrad divides by the largest u so far, t ← max(t, u) = t₋ + relu(u − t₋), whose slope is a number between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.optimizer.adaptive import AbstractAdam
from ntkexp.removal.pair import Pair, slope
from ntkexp.removal.rule.base import AbstractDifferenceRule, Adjoints, StepEnds

MEAN, ROOT, LARGEST = "mean", "latest", "square"
"""Where the adjoints of m, of u and of t are kept, by the names that m, u² and t² have in the memory."""


@dataclass(frozen=True)
class AdaptiveDifference(AbstractDifferenceRule):
    """The rule of Adam, with these settings."""

    optimizer: AbstractAdam

    @property
    def records(self) -> tuple[str, ...]:
        return (MEAN, ROOT, LARGEST) if self.optimizer.amsgrad else (MEAN, ROOT)

    def back(
        self, ends: StepEnds, weights: Float[Tensor, "direction weight"], memory: Adjoints
    ) -> tuple[Float[Tensor, "direction weight"], Adjoints]:
        nothing = torch.zeros_like(weights)
        (first, second), step = self.optimizer.betas, ends.index
        mean, divided = ends.after(MEAN), self.divided(ends)
        moved = -ends.sizes / (1 - first ** (step + 1)) * weights / divided.mean
        taken_in = memory.get(MEAN, nothing) + moved
        ratio = Pair(mean.first / divided.first, mean.second / divided.second).mean
        by_root = -moved * ratio / sqrt(1 - second ** (step + 1)) + memory.get(LARGEST, nothing)
        root = memory.get(ROOT, nothing)
        if self.optimizer.amsgrad:
            rate = self.rate(ends)
            root, by_root = root + rate * by_root, (1 - rate) * by_root
        else:
            root, by_root = root + by_root, nothing
        now, then = roots(ends.after(ROOT)), roots(ends.before(ROOT))
        whole = now.first + now.second
        root = torch.where(whole > 0, root / torch.where(whole > 0, whole, 1.0), 0.0)
        pulled = (1 - first) * taken_in + (1 - second) * (ends.taken.first + ends.taken.second) * root
        back = {MEAN: first * taken_in, ROOT: second * (then.first + then.second) * root, LARGEST: by_root}
        return pulled, back

    def divided(self, ends: StepEnds) -> Pair:
        """What m is divided by, n."""
        return Pair(*(self.optimizer.spread(ends.index, square) for square in ends.after(self.records[-1])))

    def rate(self, ends: StepEnds) -> Tensor:
        """How much of the change of max(t₋, u) is that of u."""
        before, now = roots(ends.before(LARGEST)), roots(ends.after(ROOT))
        beyond = Pair(now.first - before.first, now.second - before.second)
        gained = Pair(beyond.first.relu(), beyond.second.relu())
        return slope(beyond, gained, (beyond.first > 0).to(beyond.first))


def roots(squares: Pair) -> Pair:
    """The square roots at both ends."""
    return Pair(squares.first.sqrt(), squares.second.sqrt())
