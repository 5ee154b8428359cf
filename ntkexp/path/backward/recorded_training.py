"""A recorded descent as a training that can be differentiated: what each step took in, from its row and its settings.

The recording holds `optimizer.records` and `optimizer.differentiated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.flat_weights import FlatWeights, flat_like
from ntkexp.effects.trajectory import AbstractTrajectory, Denominator, TakenBatch, TrainedStep, Update
from ntkexp.optimizer.base import Memory
from ntkexp.path.backward.recording import Recording
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
        optimizer, size = self.descent.optimizer, self.step_sizes[index]
        sizes = sizes_of(self.recording.like, self.descent.factors, size)
        like, decay = self.recording.like, optimizer.weight_decay
        recursion = optimizer.recursion(index, like, sizes, memory)
        return Update(
            place=slice(None),
            scale=self.flat.vector(recursion.scale),
            carry=recursion.carry,
            intake=recursion.past,
            ahead=0.0 if recursion.now is None else self.spread_out(recursion.now),
            coupled=0.0 if optimizer.decouples else decay,
            lost=decay * self.spread_out(sizes) if optimizer.decouples and decay else 0.0,
            denominator=self.denominator(index, memory, before),
        )

    def spread_out(self, sizes: Mapping[str, float]) -> Float[Tensor, " weight"]:
        """A number for each parameter as one for each weight."""
        like = self.recording.like
        return self.flat.vector({name: torch.full_like(weight, sizes[name]) for name, weight in like.items()})

    def denominator(self, index: int, memory: Memory, before: Memory) -> Denominator | None:
        """What the step was divided by."""
        spread = self.descent.optimizer.spread_at(index)
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
