"""A training of this package carried out again, several runs at once, each with weights of the examples, and recorded
if asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from ntkexp.effects.curvature import at_once
from ntkexp.effects.plan import IN_CACHE
from ntkexp.effects.sweep import MEANS
from ntkexp.effects.trajectory import (
    FlatWeights,
    TakenBatch,
    flat_like,
)
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem
from ntkexp.kernel.record.casts import with_casts
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.optimizer.base import Memory
from ntkexp.path.recording import AbstractRecordedTraining, Frame
from ntkexp.path.step import TrainingRecipe, sizes_of
from ntkexp.progress import AbstractProgress
from ntkexp.removal.between import Ledger, Pair, TrainingPair
from ntkexp.removal.retraining import AbstractRetraining, OutputsAt, split_change
from ntkexp.shapes import Function, Weights
from ntkexp.text import short

# --- A training that can be carried out again with other weights of its examples: the same start, order and step
# sizes.
#
# Example i of the batch B_s is drawn t_i times and weighs w_i: 1 as it was trained, 0 where it is left out. The
# gradient of step s is a mean over what is left of the batch (or a sum, where the loss is one),
#
#     g_s = Σᵢ κᵢ ∇ℓᵢ(θ_s),        κᵢ = c tᵢ wᵢ,    c = scale / Σⱼ tⱼ wⱼ    (scale, for a sum)
#
# and a step of whose batch nothing is left has the gradient zero: memory and decay move the weights as they
# would. With `renormalises=False` the mean stays one over the whole batch: then who leaves makes the step
# smaller.


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
class Rerun(TrainingRecipe):
    """A training that can be carried out again, `length` steps long."""

    function: Function
    start: Weights
    inputs: Float[Tensor, "train *shape"]
    length: int
    memory_gb: float = 4.0
    renormalises: bool = (
        True  # whether a mean is one over what is left, or over the whole batch as it was
    )

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

    def outputs(
        self, vector: Float[Tensor, " weight"], inputs: Tensor
    ) -> Float[Tensor, "example out"]:
        """The network at weights that are one vector."""
        return self.function(self.flat.weights(vector), inputs)


# --- The gradient of a batch, of many runs at once.
#
# g(θ, κ) = Jᵀ(κ ⊙ ℓ′)


AT_ONCE = 16
"""How many runs are taken through the network together: more would not be faster."""


def gradient(
    rerun: Rerun,
    weights: Float[Tensor, " weight"],
    share: Float[Tensor, " row"],
    rows: Int[Tensor, " row"],
) -> Float[Tensor, " weight"]:
    """Find g(θ), given κ of the examples in these rows."""
    inputs, targets = rerun.inputs[rows], rerun.targets[rows]
    outputs, pull = vjp(lambda vector: rerun.outputs(vector, inputs), weights)[:2]
    found: Tensor = pull(share[:, None] * rerun.loss.output_gradient(outputs, targets))[0]
    return found


# --- Two trainings on film, step by step: weights, and what the optimizer remembers.
#
# Frame s of each run is [θ_s, memory after step s]. The film lies in a file that has no name: it takes room on
# the disk, which is looked at first, and is gone when no process looks at it any more, whatever ends it.


WEIGHTS = "weights"


@dataclass(frozen=True)
class Film:
    """Storage for `frames` frames; `parts` are in their order within a frame."""

    parts: tuple[str, ...]
    frames: NDArray[Any]  # [frame, part, run, weight]
    device: torch.device

    def write(self, step: int, found: Mapping[str, Float[Tensor, "run weight"]]) -> None:
        """Keep what a step began with, and what came of it."""
        for part in self.parts:
            if part in found:
                self.frames[step, self.parts.index(part)] = found[part].detach().cpu().numpy()

    def read(self, step: int, part: str, run: int) -> Float[Tensor, " weight"]:
        """A part of a frame, of one of the runs."""
        return torch.from_numpy(np.array(self.frames[step, self.parts.index(part), run])).to(
            self.device
        )


def film_for(
    parts: tuple[str, ...], frames: int, like: Float[Tensor, " weight"], folder: Path
) -> Film:
    """An empty film of two runs, in a file of this folder."""
    shape, kind = (frames, len(parts), 2, len(like)), like.cpu().numpy().dtype
    room, free = bytes_of(parts, frames, like), disk_usage(folder).free
    if free < room:
        raise Mistake(
            f"two recorded trainings take {room / 1e9:.2g} GB and {folder} has {free / 1e9:.2g} GB free; make room"
        )
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, room)
        return Film(parts, np.memmap(file, kind, "r+", shape=shape), like.device)


def bytes_of(parts: tuple[str, ...], frames: int, like: Float[Tensor, " weight"]) -> int:
    """How much room a film takes."""
    return frames * len(parts) * 2 * like.numel() * like.element_size()


# --- Training again: several runs at once, each with its own weights of the examples.
#
# All begin at the same weights and see the same batches, so that what differs in the end is what the examples
# did.


class Taken(NamedTuple):
    """A step was taken by all runs: what it began with, and what the optimizer made of it."""

    step: int
    found: Mapping[str, Float[Tensor, "run weight"]]  # θ before it, the memory after it
    weights: Float[Tensor, "run weight"]


def retrain(rerun: Rerun, weight: Float[Tensor, "run train"]) -> Iterator[Taken]:
    """Take step after step, with these weights of the examples."""
    flat, runs = rerun.flat, len(weight)
    weights = flat.vector(rerun.start).expand(runs, -1)
    memory: Memory = {}
    for step in range(rerun.length):
        drawn = rerun.batch(step)
        left = drawn.left(weight)
        share = left * rerun.divided(drawn, left)[:, None]
        with torch.no_grad(), plain_kernels():
            pulled = at_once(
                partial(gradient, rerun, rows=drawn.rows), weights, share, together=AT_ONCE
            )
        before = weights
        weights, memory = moved(rerun, step, weights, pulled, memory)
        parts = {name: flat.vector(dict(part)) for name, part in memory.items()}
        yield Taken(step, {WEIGHTS: before, **parts}, weights)


def moved(
    rerun: Rerun,
    step: int,
    weights: Float[Tensor, "run weight"],
    gradient: Float[Tensor, "run weight"],
    memory: Memory,
) -> tuple[Float[Tensor, "run weight"], Memory]:
    """Where the optimizer takes all runs, and what it remembers."""
    flat = rerun.flat
    clippings = gradient.new_tensor(
        [rerun.optimizer.clipping(flat.weights(row)) for row in gradient]
    )
    taken = gradient * clippings[:, None]
    sizes = sizes_of(rerun.start, rerun.factors, rerun.size(step))
    after, kept = rerun.optimizer.update(
        step, flat.weights(weights), flat.weights(taken), sizes, memory
    )
    return flat.vector(after), kept


def trained(rerun: Rerun, weight: Float[Tensor, "run train"]) -> Float[Tensor, "run weight"]:
    """Find the weights at the end."""
    weights = rerun.flat.vector(rerun.start).expand(len(weight), -1)
    for taken in retrain(rerun, weight):
        weights = taken.weights
    return weights


# --- The training of an experiment, to be carried out again.


def again(experiment: Experiment, problem: Problem, step_size: float, length: int) -> Rerun:
    """The training of `length` steps of this size, before its schedule."""
    if experiment.switches:
        raise Mistake(
            f"data={experiment.data.option} is learned in phases, and there is no retraining without some "
            "examples of one; its contributions are known by phase: load_run(RUN).contributions.by_phase"
        )
    if not experiment.path.explains_outputs:
        raise Mistake(
            f"path.measure={experiment.path.measure.option}: trainings without examples are compared by their outputs; "
            "run it with path.measure=output"
        )
    train = problem.train
    return Rerun(
        function=with_casts(function_of(problem.module), experiment.path.casts),
        start=problem.weights,
        inputs=problem.inputs[:train],
        targets=problem.targets[:train],
        loss=experiment.loss,
        scale=experiment.loss_scale,
        optimizer=experiment.optimizer,
        factors=experiment.optimizer.factors(problem.weights),
        schedule=experiment.schedule,
        step_size=step_size,
        steps=experiment.steps,
        length=length,
        seed=experiment.seed,
        memory_gb=experiment.room_gb,
        renormalises=experiment.path.mean == "renormalised",
    )


# --- The outputs at some points, as what is asked of a training that is carried out again.


REPEATED = 0.01
"""The training as it was must end where it did, to this share of what single removals change."""


@dataclass(frozen=True)
class RerunAt(AbstractRetraining):
    """A training with these outputs of these points; `end` is where it led with all examples, if that is known."""

    rerun: Rerun
    inputs: Float[Tensor, "point *shape"]
    outs: Sequence[int] | None = None
    end: Float[Tensor, " weight"] | None = None

    @property
    def everyone(self) -> Float[Tensor, " example"]:
        return self.rerun.everyone

    @property
    def seed(self) -> int:
        return self.rerun.seed

    @property
    def whole(self) -> Float[Tensor, "point out"]:
        assert self.end is not None
        return self.at(self.end)

    def at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        with torch.no_grad(), plain_kernels():
            found = self.rerun.outputs(end, self.inputs)
        return found if self.outs is None else found[:, list(self.outs)]

    def ends(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """All are trained at once, as far as there is memory."""
        for some in torch.split(weights, self.rerun.directions):
            yield from trained(self.rerun, some)

    def doubts(
        self, repeated: Float[Tensor, "point out"], changes: Float[Tensor, "group point out"]
    ) -> list[str]:
        """Where training amplifies rounding to the size of what it is asked about, nothing is to be believed."""
        return [] if self.end is None else drifted(repeated - self.whole, changes)


def drifted(
    missed: Float[Tensor, "point out"], changes: Float[Tensor, "group point out"]
) -> list[str]:
    """Say so, where training again as it was misses where it led by too large a share of what it is asked about."""
    changed, off = float(changes.square().mean().sqrt()), float(missed.square().mean().sqrt())
    if off <= REPEATED * changed or off == changed == 0.0:
        return []
    return [
        f"trained again as it was, the run ends {short(off)} from where it did, without single examples "
        f"{short(changed)}: its steps amplify rounding, so do not trust effects; choose a smaller step size"
    ]


# --- One of the trainings on a film, as a training that can be gone back over.


@dataclass(frozen=True, kw_only=True)
class FilmedTraining(AbstractRecordedTraining):
    """The run of this number, in which the examples had these weights."""

    rerun: Rerun
    film: Film
    run: int
    weight: Float[Tensor, " train"]

    @property
    def recipe(self) -> Rerun:
        return self.rerun

    @property
    def like(self) -> Weights:
        return self.rerun.start

    @property
    def length(self) -> int:
        return self.rerun.length

    def step_size(self, index: int) -> float:
        return self.rerun.size(index)

    def frame(self, index: int) -> Frame:
        """Read θ before a step, and the memory after it."""
        parts = {part: self.film.read(index, part, self.run) for part in self.film.parts}
        weights = parts.pop(WEIGHTS)
        return Frame(weights, {part: self.flat.weights(vector) for part, vector in parts.items()})

    def batch(self, index: int) -> TakenBatch:
        """What the step was taken on, each example once, however often it was drawn."""
        drawn = self.rerun.batch(index)
        left = drawn.left(self.weight)
        divided = self.rerun.divided(drawn, left)
        return TakenBatch(
            examples=drawn.rows,
            shares=left * divided,
            losses=partial(
                losses, self.rerun, self.rerun.inputs[drawn.rows], self.rerun.targets[drawn.rows]
            ),
            is_mean=self.rerun.loss.reduction == "mean",
            per_weight=drawn.times * divided,
        )


def losses(
    rerun: Rerun, inputs: Tensor, targets: Tensor, weights: Float[Tensor, " weight"]
) -> Float[Tensor, " row"]:
    """Return ℓᵢ of some examples, without the scale of the loss, which their shares contain."""
    return rerun.loss.value(rerun.outputs(weights, inputs), targets)


# --- A group of examples is left out: both trainings are filmed, and the difference is split over the group.


def filmed(rerun: Rerun, weight: Pair, folder: Path, progress: AbstractProgress) -> Film:
    """Train with both weights of the examples, and keep every step in a file of this folder."""
    optimizer = rerun.optimizer
    if optimizer.records and optimizer.spread_at(0) is None:
        raise Mistake(
            f"optimizer={optimizer.option} scales gradients by what it remembers of them, and differences of its steps "
            "are known for no optimizer of that kind but Adam, AdamW and RMSprop"
        )
    parts = (WEIGHTS, *dict.fromkeys((*optimizer.records, *optimizer.differentiated)))
    start = rerun.flat.vector(rerun.start)
    room = bytes_of(parts, rerun.length + 1, start)
    progress.say(
        f"training twice, with {room / 1e9:.2g} GB of both on the disk until the change is split"
    )
    film = film_for(parts, rerun.length + 1, start, folder)
    film.write(0, {WEIGHTS: start.expand(2, -1)})
    progress.start("again", rerun.length, 0)
    for taken in retrain(rerun, torch.stack(tuple(weight))):
        film.write(taken.step, taken.found)
        film.write(taken.step + 1, {WEIGHTS: taken.weights})
        progress.step(taken.step + 1)
    return film


def pair_of(rerun: Rerun, film: Film, weight: Pair) -> TrainingPair:
    """Both trainings on the film."""
    first, second = (
        FilmedTraining(rerun=rerun, film=film, run=k, weight=each) for k, each in enumerate(weight)
    )
    for which, training in (("as it was", first), ("without these examples", second)):
        if not training.end.isfinite().all():
            raise Mistake(
                f"training {which} diverges, so there is no change to split; choose a smaller step size"
            )
    lefts = (
        (step, rerun.batch(step).left(torch.stack(tuple(weight)))) for step in range(rerun.length)
    )
    begun = next(
        (step for step, (one, other) in lefts if not torch.equal(one, other)), rerun.length
    )
    return TrainingPair(
        first=first,
        second=second,
        weights=weight,
        mean=MEANS["renormalised" if rerun.renormalises else "fixed"],
        together=max(1, IN_CACHE // rerun.flat.size),
        begun=begun,
    )


AT_ONCE_BACK = 16
"""How many outputs are gone back from together, into the weights at the end."""


def ledger_between(
    rerun: Rerun,
    weight: Pair,
    inputs: Float[Tensor, "point *shape"],
    chosen: Int[Tensor, "chosen 2"],
    folder: Path,
    progress: AbstractProgress,
) -> Ledger:
    """Train with both weights of the examples, and split what differs at chosen pairs of a point and an output."""

    def outputs(
        chosen: Int[Tensor, "some 2"], weights: Float[Tensor, " weight"]
    ) -> Float[Tensor, " some"]:
        return rerun.outputs(weights, inputs)[chosen[:, 0], chosen[:, 1]]

    try:
        pair = pair_of(rerun, filmed(rerun, weight, folder, progress), weight)
        each = [
            OutputsAt([partial(outputs, some)], AT_ONCE_BACK)
            for some in torch.split(chosen, rerun.directions)
        ]
        return split_change(pair, each, progress)
    finally:
        progress.stop()
