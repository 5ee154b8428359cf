"""One-step removal: each step is taken without each of its examples in turn, exactly, and only what follows is linear.

    effect of i = Σ_s a·(θ⁻ⁱ − θ) − b·(m⁻ⁱ − m) + d·(u⁻ⁱ − u) + e·(t⁻ⁱ − t)        after step s, whose batch lacks i

The derivative has slopes in place of these differences. This variant counts what a mean over one example less is, and
what Adam makes of a change that is no small one; it needs the gradient of every example of a batch by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.adjoint import Adjoint
from ntkexp.effects.curvature import row_gradients
from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.trajectory import Denominator, TrainedStep, Update
from ntkexp.optimizer.base import GUARD


@dataclass(frozen=True)
class Change:
    """What becomes of some of the weights, and of what is remembered beside them, by an update without each example."""

    examples: Int[Tensor, " left"]
    place: slice
    weights: Float[Tensor, "left part"]
    memory: Float[Tensor, "left part"]  # −(m⁻ⁱ − m), as its adjoint is −b
    latest: Float[Tensor, "left part"] | None
    largest: Float[Tensor, "left part"] | None

    def felt(self, adjoint: Adjoint) -> Float[Tensor, "vector left"]:
        """What it does to every output, as far as the adjoint of the state after the step tells."""
        found = adjoint.weights[:, self.place] @ self.weights.T
        beside = ((adjoint.memory, self.memory), (adjoint.latest, self.latest), (adjoint.largest, self.largest))
        for rows, change in beside:
            if rows is not None and change is not None:  # None: nobody felt anything of it yet, or there is no such
                found += rows[:, self.place] @ change.T
        return found


def changes_without(step: TrainedStep, gradient: Float[Tensor, " weight"], mean: AbstractMean) -> list[Change]:
    """What becomes of all that a step moves, update by update.

    `gradient` is what the step took in, before it was clipped.
    """
    examples, without = gradients_without(step, mean)
    if step.heard is not None:
        without = without * step.heard
    p, left = clipped(gradient[None], step.clip_norm), clipped(without, step.clip_norm)
    found = []
    for update in step.updates:
        decay = update.coupled * step.weights[update.place]
        found.append(change_of(examples, update, p[0, update.place] + decay, left[:, update.place] + decay))
    return found


def gradients_without(step: TrainedStep, mean: AbstractMean) -> tuple[Tensor, Float[Tensor, "left weight"]]:
    """The examples of a step, each once, and its gradient without each of them."""
    examples = torch.unique(torch.cat([batch.examples for batch in step.batches]))
    total = step.weights.new_zeros(len(examples), len(step.weights))
    for batch, rows in zip(step.batches, row_gradients(step.batches, step.weights), strict=True):
        there = (batch.examples[None] != examples[:, None]).to(rows)
        total += mean.shares(batch, there) @ rows
    return examples, total


def clipped(gradient: Float[Tensor, "left weight"], norm: float | None) -> Float[Tensor, "left weight"]:
    """Each gradient, shortened if it is longer than that."""
    if norm is None:
        return gradient
    factors: Tensor = (norm / (torch.linalg.vector_norm(gradient, dim=1, keepdim=True) + GUARD)).clamp(max=1.0)
    return gradient * factors


def change_of(
    examples: Int[Tensor, " left"], update: Update, p: Float[Tensor, " part"], left: Float[Tensor, "left part"]
) -> Change:
    """What an update does differently that takes in `left` in place of p."""
    change = left - p
    remembered = update.intake * change
    latest = largest = None
    by = update.denominator
    if by is None:
        moved = -update.scale * remembered
    else:
        u = (by.second * by.latest_before + (1 - by.second) * left.square()).sqrt()
        t = u if by.largest_before is None else torch.maximum(u, by.largest_before.sqrt())
        n = divided(by, by.latest.sqrt() if by.largest is None else by.largest.sqrt())
        moved = -update.scale * n * ((by.mean + remembered) / divided(by, t) - by.mean / n)
        latest = u - by.latest.sqrt()
        largest = None if by.largest is None else t - by.largest.sqrt()
    return Change(examples, update.place, moved - update.ahead * change, -remembered, latest, largest)


def divided(by: Denominator, t: Tensor) -> Tensor:
    """The denominator n."""
    return t / by.root + by.eps
