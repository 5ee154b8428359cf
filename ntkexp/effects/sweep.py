"""The sweep: from the end of a training to its beginning, with what every output feels of each step on the way.

    a_T = ∂F/∂θ_T        p̂_s, a = adjoint of step s        γ_s = p̂_s back through clipping
    a_s = a + H_s γ_s        ∂F/∂wᵢ = Σ_s γ_s·∂g_s/∂wᵢ        effect of i = Σ_s γ_s·(g_s⁻ⁱ − g_s)

With the former sum this is the derivative of F(θ_T) by the weight of every example, through the whole map of training:
through every gradient, the optimizer's memory, its scalings, its clipping and its decay (Engstrom et al. 2025 call it
metagradient). An effect has the whole step that each mean takes when an example leaves, and is linear in what comes of
it. `one_step` takes the optimizer's step without the example exactly, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.adjoint import Adjoint
from ntkexp.effects.clipping import Clipping
from ntkexp.effects.curvature import curvature, gradient
from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.one_step import one_step_effects
from ntkexp.effects.trajectory import AbstractTrajectory, TrainedStep


@dataclass(kw_only=True)
class AdjointSweep:
    """The sweep for some outputs; `left` steps are before it. `sizes[s]` is Σ‖a_s‖ over the outputs."""

    trajectory: AbstractTrajectory
    mean: AbstractMean
    adjoint: Adjoint
    effects: Float[Tensor, "vector example"]  # what would come of F without each example
    left: int
    one_step: bool = False
    together: int | None = None  # vectors in one pass; None: all
    sizes: list[float] = field(default_factory=list)  # from the end on

    def steps_back(self) -> Iterator[int]:
        """Take the steps that are left back; how many are left after each."""
        while self.left:
            self.take(self.left - 1)
            self.left -= 1
            yield self.left

    def take(self, index: int) -> None:
        """Take one step back."""
        step = self.trajectory.step(index)
        clipping = Clipping(self.gradient(step), step.clip_norm)
        if self.one_step and step.batches:
            examples, found = one_step_effects(step, self.adjoint, clipping.gradient, self.mean)
            self.effects.index_add_(1, examples, found)
        pulled = clipping.back(self.adjoint.back(step, clipping.factor * clipping.gradient))
        if step.batches:
            self.take_in(step, pulled)
        self.sizes.append(size(self.adjoint))

    def gradient(self, step: TrainedStep) -> Float[Tensor, " weight"]:
        """The gradient that the step took in."""
        if not step.batches:
            return torch.zeros_like(step.weights)
        found = gradient(step.batches, step.weights)
        return found if step.heard is None else found * step.heard

    def take_in(self, step: TrainedStep, pulled: Float[Tensor, "vector weight"]) -> None:
        """What is pulled on the gradient pulls on the examples, and on the weights that it was made at."""
        curved, along = curvature(step.batches, step.weights, pulled, self.together)
        self.adjoint.weights += curved
        if self.one_step:
            return
        rows = torch.split(along, [len(batch.examples) for batch in step.batches], dim=1)
        for part, batch in zip(rows, step.batches, strict=True):
            self.effects.index_add_(1, batch.examples, self.mean.removals(part, batch))

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {"left": self.left, "sizes": self.sizes, "effects": self.effects, "adjoint": self.adjoint.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.left, self.sizes = state["left"], list(state["sizes"])
        self.effects = state["effects"].to(self.effects.device)
        rows = {name: row.to(self.effects.device) for name, row in state["adjoint"].items()}
        self.adjoint = Adjoint(**rows)


def sweep_from(
    trajectory: AbstractTrajectory,
    end: Float[Tensor, "vector weight"],
    mean: AbstractMean,
    together: int | None = None,
    *,
    one_step: bool = False,
) -> AdjointSweep:
    """The sweep before its first step back, from ∂F/∂θ_T."""
    adjoint = Adjoint(weights=end.clone())
    return AdjointSweep(
        trajectory=trajectory,
        mean=mean,
        adjoint=adjoint,
        effects=end.new_zeros(len(end), trajectory.examples),
        left=trajectory.length,
        together=together,
        one_step=one_step,
        sizes=[size(adjoint)],
    )


def size(adjoint: Adjoint) -> float:
    """Σ‖a‖ over the outputs."""
    return float(torch.linalg.vector_norm(adjoint.weights, dim=1).sum())
