"""A training that can be carried out again with other weights of its examples: the same start, order and step sizes.

Example i of the batch B_s is drawn t_i times and weighs w_i: 1 as it was trained, 0 where it is left out. The gradient
of step s is a mean over what is left of the batch (or a sum, where the loss is one),

    g_s = Σᵢ κᵢ ∇ℓᵢ(θ_s),        κᵢ = c tᵢ wᵢ,    c = scale / Σⱼ tⱼ wⱼ    (scale, for a sum)

and a step of whose batch nothing is left has the gradient zero: memory and decay move the weights as they would. With
`renormalises=False` the mean stays one over the whole batch: then who leaves makes the step smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.flat_weights import FlatWeights, flat_like
from ntkexp.loss.base import AbstractLoss
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer, filled
from ntkexp.path.step import sizes_of
from ntkexp.schedule.base import AbstractSchedule
from ntkexp.shapes import Function, Weights

DIRECTION = 12


@dataclass(frozen=True)
class Drawn:
    """The examples of a batch, each once, and how often each was drawn."""

    rows: Int[Tensor, " row"]
    times: Float[Tensor, " row"]

    def left(self, weight: Float[Tensor, "*run train"]) -> Float[Tensor, "*run row"]:
        """The weight tᵢwᵢ that each has in the batch."""
        return self.times * weight[..., self.rows]


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What is trained on what, how, and for how long."""

    function: Function
    start: Weights
    inputs: Float[Tensor, "train *shape"]
    targets: Float[Tensor, "train out"]
    loss: AbstractLoss
    scale: float  # multiplies the loss
    optimizer: AbstractOptimizer
    factors: Mapping[str, float]  # of the step size, by weight
    schedule: AbstractSchedule
    step_size: float
    steps: int  # that the schedule is made for
    length: int  # that are taken
    seed: int
    memory_gb: float = 4.0
    renormalises: bool = True  # whether a mean is one over what is left, or over the whole batch as it was

    def __post_init__(self) -> None:
        if self.optimizer.flows:
            raise Mistake(
                f"optimizer={self.optimizer.option} takes no steps that could be taken again without an example; "
                "train with a small optimizer.step_size of optimizer=gd"
            )

    @cached_property
    def flat(self) -> FlatWeights:
        """How weights are one vector."""
        return flat_like(self.start)

    @property
    def examples(self) -> int:
        """How many training examples there are."""
        return len(self.inputs)

    @cached_property
    def everyone(self) -> Float[Tensor, " train"]:
        """The weights of the examples in the training as it was."""
        return self.targets.new_ones(self.examples)

    def without(self, group: list[int]) -> Float[Tensor, " train"]:
        """The weights of the examples when these are left out."""
        weight = self.everyone.clone()
        weight[group] = 0.0
        return weight

    @property
    def directions(self) -> int:
        """How many directions in weight space may be gone back with at once: each has a dozen vectors of its own."""
        each = DIRECTION * self.flat.size * self.targets.element_size()
        return max(1, int(self.memory_gb * 1e9 / 2 / each))

    def batch(self, step: int) -> Drawn:
        """What the step is taken on."""
        drawn = self.optimizer.batch_indices(step, self.examples, self.seed)
        if drawn is None:
            return Drawn(torch.arange(self.examples, device=self.inputs.device), self.everyone)
        rows, times = torch.unique(drawn, return_counts=True)
        return Drawn(rows.to(self.inputs.device), times.to(self.targets))

    def divided(self, drawn: Drawn, left: Float[Tensor, "*run row"]) -> Float[Tensor, "*run"]:
        """The factor c, given what is left of a batch; where that is nothing, it multiplies nothing."""
        whole = left.sum(-1)
        if self.loss.reduction == "sum":
            return torch.full_like(whole, self.scale)
        if not self.renormalises:
            return torch.full_like(whole, self.scale / float(drawn.times.sum()))
        return self.scale / torch.where(whole == 0, 1.0, whole)

    def size(self, step: int) -> float:
        """The step size η_s."""
        return self.step_size * self.schedule.factor(step, self.steps)

    def sizes(self, step: int) -> dict[str, float]:
        """The step size of every parameter."""
        return dict(sizes_of(self.start, self.factors, self.size(step)))

    def spread(self, numbers: Mapping[str, float]) -> Float[Tensor, " weight"]:
        """The number of its parameter, for every weight."""
        return self.flat.vector(filled(self.start, numbers))

    def outputs(self, vector: Float[Tensor, " weight"], inputs: Tensor) -> Float[Tensor, "example out"]:
        """The network at weights that are one vector."""
        return self.function(self.flat.weights(vector), inputs)
