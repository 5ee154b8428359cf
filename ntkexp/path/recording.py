"""What a way back needs of a path, recorded: the weights at every step, ℓ′, and the optimizer's state; played back as
steps or differentiated.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.effects.trajectory import (
    AbstractTrajectory,
    Denominator,
    FlatWeights,
    TakenBatch,
    TrainedStep,
    Update,
    flat_like,
)
from ntkexp.optimizer.base import AbstractOptimizer, Coefficient, Memory, Sizes, spread
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.points import NetworkView, Points
from ntkexp.path.step import Descent, Step, TrainingRecipe, sizes_of
from ntkexp.records.data import Trajectory
from ntkexp.shapes import Weights

# --- What a way back needs of a path: the weights at every step, ℓ′, and the recorded part of the optimizer's memory.
#
# Row s of the trajectory is [θ_s, memory after step s, ℓ′(s)], the weights parameter by parameter.


class Recorded(NamedTuple):
    """A row: θ_s, the memory after the step, and ℓ′(s)."""

    weights: Weights
    memory: Memory
    output_gradient: Float[Tensor, "train out"]


def row_length(weights: Weights, records: tuple[str, ...], pull: Float[Tensor, "train out"]) -> int:
    """How many numbers a row has."""
    return (1 + len(records)) * sum(weight.numel() for weight in weights.values()) + pull.numel()


Room: TypeAlias = Callable[[int, int], Trajectory]
"""Allocates `rows` rows of `length` numbers."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps as rows; `like` gives names and shapes of weights, `pull` the shape of ℓ′."""

    rows: Trajectory
    like: Weights
    records: tuple[str, ...]
    pull: Float[Tensor, "train out"]

    def write(self, step: Step) -> None:
        """Keep a step."""
        groups = [step.view.weights, *(step.memory[part] for part in self.records)]
        self.put(
            step.index,
            [group[name] for group in groups for name in self.like] + [step.output_gradient],
        )

    def close(self, steps: int, end: Weights) -> None:
        """Keep the weights after the last step."""
        self.put(steps, [end[name] for name in self.like])

    def put(self, row: int, tensors: list[Tensor]) -> None:
        """Write tensors one after another, and zeros behind the last."""
        numbers = [tensor.detach().cpu().reshape(-1).numpy() for tensor in tensors]
        missing = self.rows.size - sum(map(len, numbers))
        self.rows.write(row, np.concatenate([*numbers, np.zeros(missing, self.rows.kind)]))

    def read(self, step: int) -> Recorded:
        """What was kept of a step."""
        row = torch.from_numpy(self.rows.read(step))
        groups: list[dict[str, Tensor]] = []
        at = 0
        for _ in range(1 + len(self.records)):
            groups.append({})
            for name, weight in self.like.items():
                numbers = row[
                    at : at + weight.numel()
                ].clone()  # of its own storage, as a parameter has one
                groups[-1][name] = numbers.view(weight.shape).to(weight.device)
                at += weight.numel()
        pull = (
            row[len(row) - self.pull.numel() :].clone().view(self.pull.shape).to(self.pull.device)
        )
        return Recorded(groups[0], dict(zip(self.records, groups[1:], strict=True)), pull)


def new_recording(
    steps: int,
    like: Weights,
    records: tuple[str, ...],
    pull: Float[Tensor, "train out"],
    room: Room,
) -> Recording:
    """An empty recording of `steps` steps."""
    rows = room(steps + 1, row_length(like, records, pull))
    return Recording(rows=rows, like=like, records=records, pull=pull)


@dataclass(frozen=True, kw_only=True)
class Playback:
    """The steps that were recorded, with what is not in their rows: they may be gone over in any order."""

    recording: Recording
    points: Points
    step_sizes: Sequence[float]
    factors: Mapping[str, float]
    weight_decay: float

    def __iter__(self) -> Iterator[Step]:
        """The steps from the first to the last; each begins at the very weights that the one before ends at."""
        start = None
        for index in range(len(self.step_sizes)):
            step = self.step(index, start=start)
            yield step
            start = step.end

    def step(self, index: int, *, start: Weights | None = None, end: Weights | None = None) -> Step:
        """One of them; an end that is known already is taken as it is, with the tapes that are kept of it."""
        recorded = self.recording.read(index)
        return Step(
            index=index,
            view=NetworkView(self.points, start or recorded.weights),
            end=end or self.recording.read(index + 1).weights,
            output_gradient=recorded.output_gradient,
            step_size=self.step_sizes[index],
            factors=self.factors,
            weight_decay=self.weight_decay,
            memory=recorded.memory,
        )


# --- A recorded descent as a training that can be differentiated: what each step took in, from its row and its
# settings.
#
# The recording holds `optimizer.records` and `optimizer.differentiated`.


class Frame(NamedTuple):
    """The weights before a step, as one vector, and the optimizer's memory after it."""

    weights: Float[Tensor, " weight"]
    memory: Memory


class AbstractRecordedTraining(AbstractTrajectory):
    """A training by a `TrainingRecipe`, with a frame for every step and one for the end."""

    @property
    @abstractmethod
    def recipe(self) -> TrainingRecipe: ...

    @property
    @abstractmethod
    def like(self) -> Weights:
        """Weights that give the names and shapes."""

    @abstractmethod
    def step_size(self, index: int) -> float:
        """Return η_s."""

    @abstractmethod
    def frame(self, index: int) -> Frame:
        """Read the frame of a step; that after the last step has no memory."""

    @abstractmethod
    def batch(self, index: int) -> TakenBatch:
        """Return the examples of a step, with their shares in its loss."""

    @property
    def examples(self) -> int:
        return len(self.recipe.targets)

    @cached_property
    def flat(self) -> FlatWeights:
        return flat_like(self.like)

    @property
    def end(self) -> Float[Tensor, " weight"]:
        return self.frame(self.length).weights

    def step(self, index: int) -> TrainedStep:
        frame = self.frame(index)
        memory_before = self.frame(index - 1).memory if index else {}
        optimizer = self.recipe.optimizer
        sizes = sizes_of(self.like, self.recipe.factors, self.step_size(index))
        update = update_of(optimizer, self.like, index, sizes, frame.memory, memory_before)
        return TrainedStep(
            index=index,
            weights=frame.weights,
            batches=(self.batch(index),),
            updates=(update,),
            clip_norm=optimizer.clip_norm,
        )


@dataclass(frozen=True, kw_only=True)
class RecordedTraining(AbstractRecordedTraining):
    """The steps of a descent, whose sizes are known, from their rows."""

    recording: Recording
    descent: Descent
    step_sizes: Sequence[float]

    @property
    def recipe(self) -> Descent:
        return self.descent

    @property
    def like(self) -> Weights:
        return self.recording.like

    @property
    def length(self) -> int:
        return len(self.step_sizes)

    def step_size(self, index: int) -> float:
        return self.step_sizes[index]

    def frame(self, index: int) -> Frame:
        recorded = self.recording.read(index)
        return Frame(self.flat.vector(recorded.weights), recorded.memory)

    def batch(self, index: int) -> TakenBatch:
        """Return the batch with a row for every draw: an example that was drawn twice has two."""
        descent = self.descent
        drawn = descent.optimizer.batch_indices(index, self.examples, descent.seed)
        rows = (torch.arange(self.examples) if drawn is None else drawn).to(descent.targets.device)
        return TakenBatch(
            examples=rows,
            shares=descent.targets.new_full((len(rows),), descent.loss.weight(len(rows))),
            losses=partial(self.losses, rows),
            is_mean=descent.loss.reduction == "mean",
        )

    def losses(
        self, rows: Int[Tensor, " row"], weights: Float[Tensor, " weight"]
    ) -> Float[Tensor, " row"]:
        """ℓ of these examples, with what scales the loss."""
        points, descent = self.descent.points, self.descent
        outputs = points.reader.function(self.flat.weights(weights), points.inputs[rows])
        return descent.loss.value(outputs, descent.targets[rows]) * descent.scale


def update_of(
    optimizer: AbstractOptimizer,
    like: Weights,
    index: int,
    sizes: Sizes,
    memory: Memory,
    before: Memory,
) -> Update:
    """How a step of an optimizer took its gradient in, as one linear update of all weights, given what was recorded of
    its memory after the step and before.

    Along all weights as one vector S, N and d are vectors too, and the other letters, which an optimizer of the
    runner has in common for all parameters, are numbers.
    """
    flat, linear = flat_like(like), optimizer.linear_steps(index, sizes, memory)

    def vector(numbers: Mapping[str, Coefficient]) -> Coefficient:
        if all(isinstance(each, float) and not each for each in numbers.values()):
            return 0.0
        return flat.vector({name: spread(numbers[name], weight) for name, weight in like.items()})

    # what it was divided by, if it was: √v, or the largest so far
    denominator, divisor = None, optimizer.spread_at(index)
    if divisor is not None:
        now = {part: flat.vector(weights) for part, weights in memory.items()}
        then = {part: flat.vector(weights) for part, weights in before.items()}
        latest, nothing = "latest" if divisor.largest else "square", torch.zeros_like(now["mean"])
        denominator = Denominator(
            second=divisor.second,
            root=divisor.root,
            eps=divisor.eps,
            mean=now["mean"],
            latest=now[latest],
            latest_before=then.get(latest, nothing),
            largest=now["square"] if divisor.largest else None,
            largest_before=then.get("square", nothing) if divisor.largest else None,
        )
    one = next(iter(linear.values()))
    whole = replace(
        one,
        momentum_scale=vector({name: each.momentum_scale for name, each in linear.items()}),
        gradient_scale=vector({name: each.gradient_scale for name, each in linear.items()}),
        decoupled_decay=vector({name: each.decoupled_decay for name, each in linear.items()}),
    )
    return Update(place=slice(None), linear=whole, denominator=denominator)


# --- When each example acted on each point, where that is known step by step: the time by which half of it was done.
#
#     m_i(r) = |contribution of example i at step r|,        Σ_{r before h} m_i(r) = ½ Σ_r m_i(r)
#
# A gradient that is remembered acts at the step it is taken, by all that the steps after it make of it; no kernel
# of a moment knows of that. The masses are kept for at most `STRETCHES` stretches of the path, and spread evenly
# inside them.


STRETCHES = 20


@dataclass(frozen=True)
class Halves(Resumable):
    """Masses by stretch; `edges` are the steps at which stretches begin, and the one after the last."""

    edges: tuple[int, ...]
    mass: Float[Tensor, "stretch probe out train"]

    checkpointed: ClassVar[tuple[str, ...]] = ("mass",)

    def add(self, step: int, place: slice, parts: Float[Tensor, "chosen out train"]) -> None:
        """Take in what a step contributed at some of the points."""
        self.mass[bisect_right(self.edges, step) - 1, place] += parts.abs()

    def add_rows(
        self, step: int, rows: Int[Tensor, " row"], parts: Float[Tensor, "probe out row"]
    ) -> None:
        """Take in what the rows of a step contributed to all points, each of the example that is named for it.

        >>> halves = Halves((0, 1), torch.zeros(1, 1, 1, 2))
        >>> halves.add_rows(0, torch.tensor([1, 1]), torch.tensor([[[3.0, -1.0]]]))
        >>> halves.mass.flatten().tolist()
        [0.0, 2.0]
        """
        examples, places = torch.unique(rows, return_inverse=True)
        summed = parts.new_zeros(*parts.shape[:2], len(examples)).index_add_(2, places, parts)
        self.mass[bisect_right(self.edges, step) - 1].index_add_(2, examples, summed.abs())

    def by(self, step_sizes: Sequence[float]) -> Float[Tensor, "probe out train"]:
        """The share of the path's time by which half was done; NaN where nothing was.

        >>> halves = Halves((0, 1, 2), torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
        >>> halves.by([1.0, 1.0]).item()  # a third of the second step, which makes three quarters
        0.6666666865348816
        """
        if not step_sizes:
            return torch.full_like(self.mass[0], torch.nan)
        elapsed = torch.tensor([0.0, *step_sizes]).to(self.mass).cumsum(0)[list(self.edges)]
        before = torch.cat([torch.zeros_like(self.mass[:1]), self.mass.cumsum(0)])
        half = before[-1:] / 2
        stretch = (before[1:] < half).sum(0, keepdim=True).clamp(max=len(self.mass) - 1)
        start, made = before.gather(0, stretch), self.mass.gather(0, stretch)
        begun = elapsed[stretch]
        time = begun + (half - start) / made * (elapsed[stretch + 1] - begun)
        return (time / elapsed[-1])[0]


def halves_at_zero(steps: int, like: Float[Tensor, "probe out train"]) -> Halves:
    """The state before the first step of a path of `steps` steps."""
    count = min(steps, STRETCHES)
    edges = tuple(round(k * steps / count) for k in range(count + 1)) if count else (0,)
    return Halves(edges, torch.zeros_like(like).expand(max(count, 1), *like.shape).clone())
