"""How a step of an optimizer took its gradient in, as one linear update of all weights by what it had recorded.

The letters are those of `effects.trajectory`, in the coefficients of the optimizer's own sum backwards:

    S = scale,    β = carry,    α = past,    N = now,    λ or d = weight decay, through the memory or past it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.flat_weights import FlatWeights
from ntkexp.effects.trajectory import Denominator, Update
from ntkexp.optimizer.base import AbstractOptimizer, Memory, filled
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class OptimizerUpdates:
    """The updates of an optimizer of such weights."""

    optimizer: AbstractOptimizer
    like: Weights
    flat: FlatWeights

    def at(self, index: int, sizes: Mapping[str, float], memory: Memory, before: Memory) -> Update:
        """Find the update of a step, given the step size of every parameter and what was recorded after and before."""
        decay, decouples = self.optimizer.weight_decay, self.optimizer.decouples
        recursion = self.optimizer.recursion(index, self.like, sizes, memory)
        return Update(
            place=slice(None),
            scale=self.flat.vector(recursion.scale),
            carry=recursion.carry,
            intake=recursion.past,
            ahead=0.0 if recursion.now is None else self.spread_out(recursion.now),
            coupled=0.0 if decouples else decay,
            lost=decay * self.spread_out(sizes) if decouples and decay else 0.0,
            denominator=self.denominator(index, memory, before),
        )

    def spread_out(self, sizes: Mapping[str, float]) -> Float[Tensor, " weight"]:
        """A number for each parameter as one for each weight."""
        return self.flat.vector(filled(self.like, sizes))

    def denominator(self, index: int, memory: Memory, before: Memory) -> Denominator | None:
        """What the step was divided by."""
        spread = self.optimizer.spread_at(index)
        if spread is None:
            return None
        now, past = self.vectors(memory), self.vectors(before)
        latest = "latest" if spread.largest else "square"
        nothing = torch.zeros_like(now["mean"])
        return Denominator(
            second=spread.second,
            root=spread.root,
            eps=spread.eps,
            mean=now["mean"],
            latest=now[latest],
            latest_before=past.get(latest, nothing),
            largest=now["square"] if spread.largest else None,
            largest_before=past.get("square", nothing) if spread.largest else None,
        )

    def vectors(self, memory: Memory) -> dict[str, Tensor]:
        """The parts of a memory, each as a vector."""
        return {part: self.flat.vector(weights) for part, weights in memory.items()}
