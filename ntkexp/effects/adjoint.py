"""What every output would feel of a change of the training's state: of weights, and of what the optimizer remembers.

    a = ∂F/∂θ      −b = ∂F/∂m      d = ∂F/∂u      e = ∂F/∂t        a row for every output F

Back over a step of `trajectory`, with r = m/n and 1[u > t′] where AMSGrad's largest t′ so far was passed:

    b ← b + S⊙a
    t ∋ n:   e ← e + S⊙a⊙r/ρ          AMSGrad   d ← d + 1[u > t′] e,  e ← 1[u ≤ t′] e;     Adam   d ← d + e,  e ← 0
    p̂ = −αb − N⊙a + (1 − β₂)(p/u) d
    b ← βb,   d ← β₂(u′/u) d,   a ← (1 − d)a + λp̂
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.trajectory import Coefficient, Denominator, TrainedStep, Update


@dataclass(kw_only=True)
class Adjoint:
    """The rows a, b, d and e; the last three are made when a step first needs them."""

    weights: Float[Tensor, "vector weight"]
    memory: Tensor | None = None
    latest: Tensor | None = None
    largest: Tensor | None = None

    def back(self, step: TrainedStep, taken: Float[Tensor, " weight"]) -> Float[Tensor, "vector weight"]:
        """Take one step back, which took this gradient in; what is pulled on that."""
        pulled = torch.zeros_like(self.weights)
        for update in step.updates:
            place = update.place
            p = taken[place] + update.coupled * step.weights[place]
            pulled[:, place] = self.through(update, p)
            self.weights[:, place] *= 1 - update.lost
            if nonzero(update.coupled):
                self.weights[:, place] += update.coupled * pulled[:, place]
        return pulled

    def through(self, update: Update, p: Float[Tensor, " part"]) -> Float[Tensor, "vector part"]:
        """Take an update back: what is pulled on p."""
        felt = self.weights[:, update.place]
        moved = update.scale * felt
        pulled = -update.ahead * felt if nonzero(update.ahead) else torch.zeros_like(felt)
        if update.denominator is not None:
            pulled += self.through_denominator(update.denominator, update.place, moved, p)
        if not update.carry and self.memory is None:
            return pulled.sub_(moved, alpha=update.intake)
        if self.memory is None:
            self.memory = torch.zeros_like(self.weights)
        memory = self.memory[:, update.place]
        memory += moved
        pulled.sub_(memory, alpha=update.intake)
        memory *= update.carry
        return pulled

    def through_denominator(
        self, by: Denominator, place: slice, moved: Float[Tensor, "vector part"], p: Float[Tensor, " part"]
    ) -> Float[Tensor, "vector part"]:
        """Take what a step was divided by back: what that pulls on p."""
        if self.latest is None:
            self.latest = torch.zeros_like(self.weights)
        u, before, latest = by.latest.sqrt(), by.latest_before.sqrt(), self.latest[:, place]
        t = u if by.largest is None else by.largest.sqrt()
        felt = moved * (by.mean / (t / by.root + by.eps) / by.root)
        if by.largest_before is not None:
            passed = (u > by.largest_before.sqrt()).to(u) if by.passed is None else by.passed
            felt = self.below_largest(place, felt, passed)
        latest += felt
        shares = torch.where(u > 0, 1 / torch.where(u > 0, u, 1.0), 0.0)
        pulled = latest * ((1 - by.second) * p * shares)
        latest *= by.second * before * shares
        return pulled

    def below_largest(
        self, place: slice, felt: Float[Tensor, "vector part"], passed: Tensor
    ) -> Float[Tensor, "vector part"]:
        """What goes on to u, where it has passed the largest so far; the rest stays with that."""
        if self.largest is None:
            self.largest = torch.zeros_like(self.weights)
        largest = self.largest[:, place]
        largest += felt
        found = largest * passed
        largest *= 1 - passed
        return found

    @property
    def state(self) -> dict[str, Tensor]:
        """The rows, for a checkpoint."""
        rows = {"weights": self.weights, "memory": self.memory, "latest": self.latest, "largest": self.largest}
        return {name: row for name, row in rows.items() if row is not None}


def nonzero(coefficient: Coefficient) -> bool:
    """Whether there is anything to multiply with."""
    return isinstance(coefficient, Tensor) or coefficient != 0.0
