"""The trajectory of a training run, recorded for passes from the last step to the first.

A recording stores, for each step s, the weights θ_s before the step, the optimizer's
state after the step, and ℓ′(s), the derivatives of the loss by the outputs. `Playback`
reads the recording as steps of a path, for contributions. `RecordedTraining` reads it
as training steps that can be differentiated, for leave-out effects."""

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
from ntkexp.optimizer.base import (
    AbstractOptimizer,
    Coefficient,
    Memory,
    Sizes,
    per_weight,
)
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.points import NetworkView, Points
from ntkexp.path.step import Descent, Step, TrainingRecipe, sizes_of
from ntkexp.records.data import Trajectory
from ntkexp.shapes import Weights

# --- A row of a recording: the numbers of θ_s, of the optimizer's state after step s,
# and of ℓ′(s), one after the other.


class Recorded(NamedTuple):
    """One step of a recording: weights, optimizer state and ℓ′."""

    weights: Weights
    memory: Memory
    output_gradient: Float[Tensor, "train out"]


def row_length(
    weights: Weights,
    records: tuple[str, ...],
    output_gradient_like: Float[Tensor, "train out"],
) -> int:
    """Return the length of the row of a step: weights,
    recorded optimizer states and ℓ′."""
    parameters = sum(weight.numel() for weight in weights.values())
    return (1 + len(records)) * parameters + output_gradient_like.numel()


AllocateRows: TypeAlias = Callable[[int, int], Trajectory]
"""A function from (rows, length) to storage for `rows` rows of `length` numbers."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The steps of a training run, one row per step."""

    rows: Trajectory
    like: Weights  # tensors with the names and shapes of the weights
    records: tuple[str, ...]  # names of the recorded parts of the optimizer's state
    # a tensor in the shape of ℓ′
    output_gradient_like: Float[Tensor, "train out"]

    def write(self, step: Step) -> None:
        groups = [step.view.weights]
        groups += [step.memory[part] for part in self.records]
        tensors = [group[name] for group in groups for name in self.like]
        self.write_row(step.index, [*tensors, step.output_gradient])

    def close(self, steps: int, end: Weights) -> None:
        """Write the weights after the last step."""
        self.write_row(steps, [end[name] for name in self.like])

    def write_row(self, row: int, tensors: list[Tensor]) -> None:
        """Write the concatenated tensors as one row, padded with zeros."""
        numbers = [tensor.detach().cpu().reshape(-1).numpy() for tensor in tensors]
        missing = self.rows.size - sum(map(len, numbers))
        padding = np.zeros(missing, self.rows.kind)
        self.rows.write(row, np.concatenate([*numbers, padding]))

    def read(self, step: int) -> Recorded:
        row = torch.from_numpy(self.rows.read(step))
        groups: list[dict[str, Tensor]] = []
        start = 0
        for _ in range(1 + len(self.records)):
            group = {}
            for name, weight in self.like.items():
                # copy, so that the parameters do not share storage
                numbers = row[start : start + weight.numel()].clone()
                group[name] = numbers.view(weight.shape).to(weight.device)
                start += weight.numel()
            groups.append(group)
        like = self.output_gradient_like
        numbers = row[len(row) - like.numel() :].clone()
        output_gradient = numbers.view(like.shape).to(like.device)
        memory = dict(zip(self.records, groups[1:], strict=True))
        return Recorded(groups[0], memory, output_gradient)


def new_recording(
    steps: int,
    like: Weights,
    records: tuple[str, ...],
    output_gradient_like: Float[Tensor, "train out"],
    allocate: AllocateRows,
) -> Recording:
    rows = allocate(steps + 1, row_length(like, records, output_gradient_like))
    return Recording(
        rows=rows, like=like, records=records, output_gradient_like=output_gradient_like
    )


@dataclass(frozen=True, kw_only=True)
class Playback:
    """The recorded steps of a path, readable in any order."""

    recording: Recording
    points: Points
    step_sizes: Sequence[float]
    factors: Mapping[str, float]  # factor of each parameter's step size
    weight_decay: float

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps in order.

        The weights at the start of a step are the same tensor objects as at the end of
        the previous step, so that cached tapes remain valid."""
        start = None
        for index in range(len(self.step_sizes)):
            step = self.step(index, start=start)
            yield step
            start = step.end

    def step(
        self, index: int, *, start: Weights | None = None, end: Weights | None = None
    ) -> Step:
        """Read a step. Use the tensors `start` and `end` if they are given.

        Tapes (recorded forward passes) are cached by tensor identity, so passing the
        tensors of an adjacent step reuses its tapes."""
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


# --- A recorded training run as a sequence of steps for leave-out effects. The recording
# must contain the parts `optimizer.records` and `optimizer.differentiated` of the
# optimizer's state.


class Frame(NamedTuple):
    """The weights before a step, as one vector, and
    the optimizer's state after the step."""

    weights: Float[Tensor, " weight"]
    memory: Memory


class AbstractRecordedTraining(AbstractTrajectory):
    """A recorded training run of a `TrainingRecipe`. It has a frame for each step, and
    one for the end."""

    @property
    @abstractmethod
    def recipe(self) -> TrainingRecipe: ...

    @property
    @abstractmethod
    def like(self) -> Weights:
        """Tensors with the names and shapes of the weights."""

    @abstractmethod
    def step_size(self, index: int) -> float:
        """Return the step size η_s."""

    @abstractmethod
    def frame(self, index: int) -> Frame:
        """Read the frame of a step. The frame after the last step has no optimizer
        state."""

    @abstractmethod
    def batch(self, index: int) -> TakenBatch:
        """Return the batch of a step, with the weight of each example in the loss."""

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
        memory_before: Memory = {}
        if index > 0:
            memory_before = self.frame(index - 1).memory
        optimizer = self.recipe.optimizer
        sizes = sizes_of(self.like, self.recipe.factors, self.step_size(index))
        update = update_of(
            optimizer, self.like, index, sizes, frame.memory, memory_before
        )
        return TrainedStep(
            index=index,
            weights=frame.weights,
            batches=(self.batch(index),),
            updates=(update,),
            clip_norm=optimizer.clip_norm,
        )


@dataclass(frozen=True, kw_only=True)
class RecordedTraining(AbstractRecordedTraining):
    """A `Descent` whose steps are stored in a recording."""

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
        """Return the batch with one row per draw.
        An example that was drawn twice has two rows."""
        descent = self.descent
        rows = descent.optimizer.batch_indices(index, self.examples, descent.seed)
        if rows is None:
            rows = torch.arange(self.examples)
        rows = rows.to(descent.targets.device)
        count = len(rows)
        return TakenBatch(
            examples=rows,
            shares=descent.targets.new_full((count,), descent.loss.weight(count)),
            losses=partial(self.losses, rows),
            is_mean=descent.loss.reduction == "mean",
        )

    def losses(
        self, rows: Int[Tensor, " row"], weights: Float[Tensor, " weight"]
    ) -> Float[Tensor, " row"]:
        """Return the losses of the given examples, times the scale of the loss."""
        descent = self.descent
        points = descent.points
        outputs = points.reader.function(
            self.flat.weights(weights), points.inputs[rows]
        )
        return descent.loss.value(outputs, descent.targets[rows]) * descent.scale


def update_of(
    optimizer: AbstractOptimizer,
    like: Weights,
    index: int,
    sizes: Sizes,
    memory: Memory,
    before: Memory,
) -> Update:
    """Return the linear update of all weights by one step of an optimizer.

    `memory` and `before` are the optimizer's state after and before the step. In the
    result, `momentum_scale` (S), `gradient_scale` (N) and `decoupled_decay` (d) are
    vectors over all weights. The other fields are numbers, because they are the same
    for all parameters."""
    flat = flat_like(like)
    linear = optimizer.linear_steps(index, sizes, memory)

    def vector(field: str) -> Coefficient:
        numbers = {name: getattr(step, field) for name, step in linear.items()}
        if all(isinstance(number, float) and not number for number in numbers.values()):
            return 0.0
        return flat.vector(
            {name: per_weight(numbers[name], weight) for name, weight in like.items()}
        )

    combined = replace(
        next(iter(linear.values())),
        momentum_scale=vector("momentum_scale"),
        gradient_scale=vector("gradient_scale"),
        decoupled_decay=vector("decoupled_decay"),
    )
    denominator = denominator_of(optimizer, flat, index, memory, before)
    return Update(weight_slice=slice(None), linear=combined, denominator=denominator)


def denominator_of(
    optimizer: AbstractOptimizer,
    flat: FlatWeights,
    index: int,
    memory: Memory,
    before: Memory,
) -> Denominator | None:
    """Return the denominator n of an adaptive step, with the state of the optimizer
    before and after the step.

    Return None if the optimizer does not divide by past gradients.
    """
    formula = optimizer.denominator_at(index)
    if formula is None:
        return None
    now = {part: flat.vector(weights) for part, weights in memory.items()}
    then = {part: flat.vector(weights) for part, weights in before.items()}
    latest = "latest" if formula.amsgrad else "square"
    zeros = torch.zeros_like(now["mean"])
    denominator = Denominator(
        beta2=formula.beta2,
        bias_correction=formula.bias_correction,
        eps=formula.eps,
        mean=now["mean"],
        second_moment=now[latest],
        second_moment_before=then.get(latest, zeros),
    )
    if not formula.amsgrad:
        return denominator
    largest_before = then.get("square", zeros)
    return replace(
        denominator,
        max_second_moment=now["square"],
        max_second_moment_before=largest_before,
    )


# --- The half time h of example i at a point: the time at which half of its contribution
# has accumulated. With the mass m_i(r) = |contribution of example i at step r|,
#
#     Σ_{r before h} m_i(r) = ½ Σ_r m_i(r)
#
# With momentum, the contribution at step r includes the effect of the gradient of step
# r on all later steps. To save memory, masses are summed over at most `STRETCHES`
# stretches of consecutive steps. Within a stretch, mass is treated as uniform in time.


STRETCHES = 20


@dataclass(frozen=True)
class Halves(Resumable):
    """The mass of each example in each stretch of the path: the sum of |contribution|
    over the steps of the stretch. Stretch k contains the steps from edges[k] to
    edges[k + 1] − 1."""

    edges: tuple[int, ...]
    mass: Float[Tensor, "stretch query out train"]

    checkpointed: ClassVar[tuple[str, ...]] = ("mass",)

    def add(
        self, step: int, weight_slice: slice, parts: Float[Tensor, "chosen out train"]
    ) -> None:
        """Add the contributions of a step at the points in the slice `weight_slice`."""
        self.mass[bisect_right(self.edges, step) - 1, weight_slice] += parts.abs()

    def add_rows(
        self,
        step: int,
        rows: Int[Tensor, " row"],
        parts: Float[Tensor, "query out row"],
    ) -> None:
        """Add the contributions of a step at all points. An example may have several
        rows on the last axis of `parts`. `rows` holds the index of the example of each
        row. Add up the rows of each example before taking the absolute value.

        >>> halves = Halves((0, 1), torch.zeros(1, 1, 1, 2))
        >>> halves.add_rows(0, torch.tensor([1, 1]), torch.tensor([[[3.0, -1.0]]]))
        >>> halves.mass.flatten().tolist()
        [0.0, 2.0]
        """
        mass = self.mass[bisect_right(self.edges, step) - 1]
        if len(set(rows.tolist())) == len(rows):  # no example is repeated
            mass.index_add_(2, rows, parts.abs())
            return
        examples, places = torch.unique(rows, return_inverse=True)
        summed = parts.new_zeros(*parts.shape[:2], len(examples)).index_add_(
            2, places, parts
        )
        mass.index_add_(2, examples, summed.abs())

    def half_times(
        self, step_sizes: Sequence[float]
    ) -> Float[Tensor, "query out train"]:
        """Return each half time as a fraction of the total time, or NaN if there is no
        contribution.

        >>> halves = Halves((0, 1, 2), torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
        >>> halves.half_times([1.0, 1.0]).item()  # a third of the second step, which makes three quarters
        0.6666666865348816
        """
        if not step_sizes:
            return torch.full_like(self.mass[0], torch.nan)
        times = torch.tensor([0.0, *step_sizes]).to(self.mass).cumsum(0)
        elapsed = times[list(self.edges)]
        before = torch.cat([torch.zeros_like(self.mass[:1]), self.mass.cumsum(0)])
        half = before[-1:] / 2

        # find the stretch in which the cumulative mass reaches half, and interpolate
        # the time within it
        last = len(self.mass) - 1
        stretch = (before[1:] < half).sum(0, keepdim=True).clamp(max=last)
        start = before.gather(0, stretch)
        mass = self.mass.gather(0, stretch)
        begun = elapsed[stretch]
        share = (half - start) / mass
        time = begun + share * (elapsed[stretch + 1] - begun)
        return (time / elapsed[-1])[0]


def halves_at_zero(steps: int, like: Float[Tensor, "query out train"]) -> Halves:
    """Return zero masses for a path of `steps` steps."""
    count = min(steps, STRETCHES)
    edges: tuple[int, ...] = (0,)
    if count:
        edges = tuple(round(k * steps / count) for k in range(count + 1))
    return Halves(
        edges, torch.zeros_like(like).expand(max(count, 1), *like.shape).clone()
    )
