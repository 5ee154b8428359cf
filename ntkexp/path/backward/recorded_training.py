"""A recorded descent as a training that can be differentiated: what each step took in, from its row and its settings.

The recording holds `optimizer.records` and `optimizer.differentiated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.flat_weights import FlatWeights, flat_like
from ntkexp.effects.trajectory import AbstractTrajectory, TakenBatch, TrainedStep, Update
from ntkexp.optimizer.base import Memory
from ntkexp.path.backward.recording import Recording
from ntkexp.path.backward.update import OptimizerUpdates
from ntkexp.path.descent import Descent
from ntkexp.path.step import sizes_of


@dataclass(frozen=True, kw_only=True)
class RecordedTraining(AbstractTrajectory):
    """The steps of a descent, whose sizes are known, from their rows."""

    recording: Recording
    descent: Descent
    step_sizes: Sequence[float]

    @property
    def length(self) -> int:
        return len(self.step_sizes)

    @property
    def examples(self) -> int:
        return self.descent.points.train

    @cached_property
    def flat(self) -> FlatWeights:
        return flat_like(self.recording.like)

    @property
    def end(self) -> Float[Tensor, " weight"]:
        return self.flat.vector(self.recording.read(self.length).weights)

    def step(self, index: int) -> TrainedStep:
        recorded = self.recording.read(index)
        before = self.recording.read(index - 1).memory if index else {}
        return TrainedStep(
            index=index,
            weights=self.flat.vector(recorded.weights),
            batches=(self.batch(index),),
            updates=(self.update(index, recorded.memory, before),),
            clip_norm=self.descent.optimizer.clip_norm,
        )

    def batch(self, index: int) -> TakenBatch:
        """What the step was taken on; an example that was drawn twice has two rows."""
        descent = self.descent
        drawn = descent.optimizer.batch_indices(index, self.examples, descent.seed)
        rows = (torch.arange(self.examples) if drawn is None else drawn).to(descent.targets.device)
        shares = descent.targets.new_full((len(rows),), descent.loss.weight(len(rows)))
        return TakenBatch(
            examples=rows,
            shares=shares,
            losses=partial(self.losses, rows),
            is_mean=descent.loss.reduction == "mean",
        )

    def losses(self, rows: Int[Tensor, " row"], weights: Float[Tensor, " weight"]) -> Float[Tensor, " row"]:
        """ℓ of these examples, with what scales the loss."""
        points, descent = self.descent.points, self.descent
        outputs = points.reader.function(self.flat.weights(weights), points.inputs[rows])
        return descent.loss.value(outputs, descent.targets[rows]) * descent.scale

    def update(self, index: int, memory: Memory, before: Memory) -> Update:
        """How the optimizer took the gradient in: as its sum backwards has it, and what that takes as given."""
        sizes = sizes_of(self.recording.like, self.descent.factors, self.step_sizes[index])
        return OptimizerUpdates(self.descent.optimizer, self.recording.like, self.flat).at(index, sizes, memory, before)
