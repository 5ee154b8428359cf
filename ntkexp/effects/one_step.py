"""One-step removal: each step is taken without each of its examples in turn, exactly, and only what follows is linear.

    effect of i = Σ_s a·(θ⁻ⁱ − θ) − b·(m⁻ⁱ − m) + d·(u⁻ⁱ − u) + e·(t⁻ⁱ − t)        after step s, whose batch lacks i

The derivative has slopes in place of these differences. This variant counts what a mean over one example less is, and
what Adam makes of a change that is no small one; it needs the gradient of every example of a batch by itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.adjoint import Adjoint
from ntkexp.effects.curvature import row_gradients
from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.trajectory import Denominator, TrainedStep, Update
from ntkexp.optimizer.base import GUARD


def one_step_effects(
    step: TrainedStep, adjoint: Adjoint, gradient: Float[Tensor, " weight"], mean: AbstractMean
) -> tuple[Int[Tensor, " left"], Float[Tensor, "vector left"]]:
    """The examples of a step, and what its being taken without each does to every output.

    `adjoint` is that of the state after the step, `gradient` what the step took in, before it was clipped.
    """
    examples, without = gradients_without(step, mean)
    if step.heard is not None:
        without = without * step.heard
    p, left = clipped(gradient[None], step.clip_norm), clipped(without, step.clip_norm)
    found = adjoint.weights.new_zeros(len(adjoint.weights), len(examples))
    for update in step.updates:
        place = update.place
        decay = update.coupled * step.weights[place]
        found += felt(adjoint, update, p[0, place] + decay, left[:, place] + decay)
    return examples, found


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


def felt(
    adjoint: Adjoint, update: Update, p: Float[Tensor, " part"], left: Float[Tensor, "left part"]
) -> Float[Tensor, "vector left"]:
    """What every output feels of an update that took in `left` in place of p."""
    place, change = update.place, left - p
    remembered = update.intake * change
    by = update.denominator
    if by is None:
        moved, found = -update.scale * remembered, adjoint.weights.new_zeros(())
    else:
        u = (by.second * by.latest_before + (1 - by.second) * left.square()).sqrt()
        t = u if by.largest_before is None else torch.maximum(u, by.largest_before.sqrt())
        n = divided(by, by.latest.sqrt() if by.largest is None else by.largest.sqrt())
        moved = -update.scale * n * ((by.mean + remembered) / divided(by, t) - by.mean / n)
        found = through(adjoint.latest, place, u - by.latest.sqrt())
        if by.largest is not None:
            found = found + through(adjoint.largest, place, t - by.largest.sqrt())
    found = found + through(adjoint.weights, place, moved - update.ahead * change)
    return found - through(adjoint.memory, place, remembered)


def divided(by: Denominator, t: Tensor) -> Tensor:
    """The denominator n."""
    return t / by.root + by.eps


def through(rows: Tensor | None, place: slice, change: Float[Tensor, "left part"]) -> Tensor:
    """What is felt of a change; nothing where nobody felt anything yet."""
    return change.new_zeros(()) if rows is None else rows[:, place] @ change.T
