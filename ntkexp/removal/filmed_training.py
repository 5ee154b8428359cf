"""One of the trainings on a film, as a training that can be gone back over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.flat_weights import FlatWeights
from ntkexp.effects.trajectory import AbstractTrajectory, TakenBatch, TrainedStep
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import Memory
from ntkexp.path.backward.update import OptimizerUpdates
from ntkexp.removal.film import WEIGHTS, Film
from ntkexp.removal.rerun import Rerun


@dataclass(frozen=True, kw_only=True)
class FilmedTraining(AbstractTrajectory):
    """The run of this number, in which the examples had these weights."""

    rerun: Rerun
    film: Film
    run: int
    weight: Float[Tensor, " train"]

    @property
    def length(self) -> int:
        return self.rerun.length

    @property
    def examples(self) -> int:
        return self.rerun.examples

    @property
    def flat(self) -> FlatWeights:
        return self.rerun.flat

    @property
    def end(self) -> Float[Tensor, " weight"]:
        return self.film.read(self.length, WEIGHTS, self.run)

    @cached_property
    def updates(self) -> OptimizerUpdates:
        """How the optimizer takes gradients in."""
        return OptimizerUpdates(self.rerun.optimizer, self.rerun.start, self.flat)

    def step(self, index: int) -> TrainedStep:
        after, before = self.memory(index), self.memory(index - 1)
        return TrainedStep(
            index=index,
            weights=self.film.read(index, WEIGHTS, self.run),
            batches=(self.batch(index),),
            updates=(self.updates.at(index, self.rerun.sizes(index), after, before),),
            clip_norm=self.rerun.optimizer.clip_norm,
        )

    def memory(self, index: int) -> Memory:
        """What the optimizer remembered after a step; nothing before the first."""
        parts = [part for part in self.film.parts if part != WEIGHTS and index >= 0]
        return {part: self.flat.weights(self.film.read(index, part, self.run)) for part in parts}

    def batch(self, index: int) -> TakenBatch:
        """What the step was taken on, each example once, however often it was drawn."""
        drawn = self.rerun.batch(index)
        left = drawn.left(self.weight)
        divided = self.rerun.divided(drawn, left)
        return TakenBatch(
            examples=drawn.rows,
            shares=left * divided,
            losses=self.losses(drawn.rows),
            is_mean=self.rerun.loss.reduction == "mean",
            per_weight=drawn.times * divided,
        )

    def losses(self, rows: Int[Tensor, " row"]) -> Callable[[Float[Tensor, " weight"]], Float[Tensor, " row"]]:
        """ℓ of these examples; what scales the loss is in their shares."""
        return partial(losses, self.rerun, self.rerun.inputs[rows], self.rerun.targets[rows])


def losses(rerun: Rerun, inputs: Tensor, targets: Tensor, weights: Float[Tensor, " weight"]) -> Float[Tensor, " row"]:
    """The losses of some examples."""
    return rerun.loss.value(rerun.outputs(weights, inputs), targets)


def film_parts(rerun: Rerun) -> tuple[str, ...]:
    """What a film of the training has to hold, or why none would do."""
    optimizer = rerun.optimizer
    if optimizer.records and optimizer.spread_at(0) is None:
        raise Mistake(
            f"optimizer={optimizer.option} scales gradients by what it remembers of them, and differences of its steps "
            "are known for no optimizer of that kind but Adam and AdamW"
        )
    return (WEIGHTS, *dict.fromkeys((*optimizer.records, *optimizer.differentiated)))
