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
from ntkexp.effects.curvature import recorded_gradient
from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.one_step import changes_without
from ntkexp.effects.trajectory import AbstractTrajectory, TrainedStep


@dataclass(kw_only=True)
class AdjointSweep:
    """The sweep for some outputs; `left` steps are before it. `sizes[s]` is Σ‖a_s‖ over the outputs.

    The outputs take a step back part by part, as what a small part feels stays at hand until the step is done with it.
    """

    trajectory: AbstractTrajectory
    mean: AbstractMean
    adjoints: list[Adjoint]  # of each part
    effects: Float[Tensor, "vector example"]  # what would come of F without each example
    left: int
    one_step: bool = False
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
        recorded = recorded_gradient(step.batches, step.weights)
        clipping = Clipping(recorded.gradient if step.heard is None else recorded.gradient * step.heard, step.clip_norm)
        taken, exact = clipping.factor * clipping.gradient, self.one_step and bool(step.batches)
        without = changes_without(step, clipping.gradient, self.mean) if exact else []
        for adjoint, effects in zip(self.adjoints, self.parts(self.effects), strict=True):
            for change in without:
                effects.index_add_(1, change.examples, change.felt(adjoint))
            pulled = clipping.back(adjoint.back(step, taken))
            curved, along = recorded.curvature(pulled)
            adjoint.weights += curved
            if not self.one_step:
                self.leave(step, along, effects)
        self.sizes.append(sum(map(size, self.adjoints)))

    def parts(self, rows: Float[Tensor, "vector ..."]) -> tuple[Tensor, ...]:
        """The rows of every part, of something that has one for each output."""
        return torch.split(rows, [len(adjoint.weights) for adjoint in self.adjoints])

    def leave(
        self, step: TrainedStep, along: Float[Tensor, "vector row"], effects: Float[Tensor, "vector example"]
    ) -> None:
        """Add what comes of a step that examples leave, to the first order."""
        rows = torch.split(along, [len(batch.examples) for batch in step.batches], dim=1)
        for part, batch in zip(rows, step.batches, strict=True):
            effects.index_add_(1, batch.examples, self.mean.removals(part, batch))

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        adjoints = [adjoint.state for adjoint in self.adjoints]
        return {"left": self.left, "sizes": self.sizes, "effects": self.effects, "adjoints": adjoints}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.left, self.sizes = state["left"], list(state["sizes"])
        self.effects = state["effects"].to(self.effects.device)
        device = self.effects.device
        self.adjoints = [Adjoint(**{name: row.to(device) for name, row in each.items()}) for each in state["adjoints"]]


def sweep_from(
    trajectory: AbstractTrajectory,
    end: Float[Tensor, "vector weight"],
    mean: AbstractMean,
    together: int | None = None,
    *,
    one_step: bool = False,
) -> AdjointSweep:
    """The sweep before its first step back, from ∂F/∂θ_T; so many outputs go back together, all by default."""
    adjoints = [Adjoint(weights=part.clone()) for part in torch.split(end, together or max(1, len(end)))]
    return AdjointSweep(
        trajectory=trajectory,
        mean=mean,
        adjoints=adjoints,
        effects=end.new_zeros(len(end), trajectory.examples),
        left=trajectory.length,
        one_step=one_step,
        sizes=[sum(map(size, adjoints))],
    )


def size(adjoint: Adjoint) -> float:
    """Σ‖a‖ over the outputs."""
    return float(torch.linalg.vector_norm(adjoint.weights, dim=1).sum())
