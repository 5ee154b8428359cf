"""Retraining of a run with other example weights. Several retrainings run in parallel.

Two retrainings can be recorded, to attribute the difference of their outputs to
examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from ntkexp.capacity import DEFAULT_MEMORY, MemoryBudget, require_disk
from ntkexp.effects.curvature import batched_map
from ntkexp.effects.plan import SWEEP_CACHE_NUMBERS
from ntkexp.effects.sweep import MEANS
from ntkexp.effects.trajectory import FlatWeights, TakenBatch, flat_like
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem
from ntkexp.kernel import plain_kernels
from ntkexp.kernel.record.casts import with_casts
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.optimizer.base import Memory
from ntkexp.path.recording import AbstractRecordedTraining, Frame
from ntkexp.path.step import TrainingRecipe, sizes_of
from ntkexp.progress import AbstractProgress
from ntkexp.removal.between import Breakdown, Pair, TrainingPair
from ntkexp.removal.retraining import AbstractRetraining, ChosenOutputs, split_change
from ntkexp.shapes import Function, Weights

# --- Training that can be repeated with other example weights.
#
# The initial weights, batches and step sizes remain the same.
#
# Example i of the batch B_s is drawn tᵢ times. Its weight is wᵢ = 1 in the original
# training, and wᵢ = 0 if the example is left out. The gradient of step s is a mean
# over the remaining examples of the batch, or a sum if the loss is a sum:
#
#     g_s = Σᵢ κᵢ ∇ℓᵢ(θ_s),    κᵢ = c tᵢ wᵢ,    c = scale / Σⱼ tⱼ wⱼ for a mean, c = scale for a sum
#
# If no example of a batch remains, the gradient is zero, but momentum and decay still
# change the weights. With `renormalises=False`, c = scale / Σⱼ tⱼ, so the gradient
# becomes smaller if an example is left out.


# number of vectors of the weights' size in memory, during the backward pass of one
# output
VECTORS_PER_DIRECTION = 12


@dataclass(frozen=True)
class DrawnBatch:
    """The distinct examples of a batch, and how often each was drawn."""

    rows: Int[Tensor, " row"]
    times: Float[Tensor, " row"]

    def weighted(
        self, weight: Float[Tensor, "*run train"]
    ) -> Float[Tensor, "*run row"]:
        """Return tᵢwᵢ for each distinct example i, which was drawn
        tᵢ times and has the weight wᵢ."""
        return self.times * weight[..., self.rows]


@dataclass(frozen=True, kw_only=True)
class Rerun(TrainingRecipe):
    """A training run of `length` steps that can be repeated
    with other example weights."""

    function: Function
    start: Weights
    inputs: Float[Tensor, " train *shape"]
    length: int
    budget: MemoryBudget = DEFAULT_MEMORY
    # True if the mean is over the remaining examples of the batch only
    renormalises: bool = True

    def __post_init__(self) -> None:
        if self.optimizer.flows:
            raise Mistake(
                f"optimizer={self.optimizer.option} is a flow without steps, so training cannot "
                "be repeated without an example; use optimizer=gd with a small "
                "optimizer.step_size"
            )

    @cached_property
    def flat(self) -> FlatWeights:
        """The layout of all weights as one vector."""
        return flat_like(self.start)

    @property
    def examples(self) -> int:
        return len(self.inputs)

    @cached_property
    def unit_weights(self) -> Float[Tensor, " train"]:
        return self.targets.new_ones(self.examples)

    def without(self, group: list[int]) -> Float[Tensor, " train"]:
        """Return example weights that leave out a group."""
        weight = self.unit_weights.clone()
        weight[group] = 0.0
        return weight

    @property
    def directions(self) -> int:
        """The number of outputs per backward pass. A pass uses
        at most half of the memory."""
        bytes_each = (
            VECTORS_PER_DIRECTION * self.flat.size * self.targets.element_size()
        )
        return self.budget.largest_batch(2 * bytes_each)

    def batch(self, step: int) -> DrawnBatch:
        drawn = self.optimizer.batch_indices(step, self.examples, self.seed)
        if drawn is None:
            return DrawnBatch(
                torch.arange(self.examples, device=self.inputs.device),
                self.unit_weights,
            )
        rows, times = torch.unique(drawn, return_counts=True)
        return DrawnBatch(rows.to(self.inputs.device), times.to(self.targets))

    def mean_factor(
        self, drawn: DrawnBatch, weighted: Float[Tensor, "*run row"]
    ) -> Float[Tensor, "*run"]:
        """Return the factor c in the shares κᵢ = c tᵢwᵢ of a
        batch. `weighted` is tᵢwᵢ."""
        total = weighted.sum(-1)
        if self.loss.reduction == "sum":
            return torch.full_like(total, self.scale)
        if not self.renormalises:
            return torch.full_like(total, self.scale / float(drawn.times.sum()))
        return self.scale / torch.where(total == 0, 1.0, total)

    def outputs(
        self, vector: Float[Tensor, " weight"], inputs: Tensor
    ) -> Float[Tensor, "example out"]:
        """Return the outputs of the network, given its weights as one vector."""
        return self.function(self.flat.weights(vector), inputs)


# --- The gradient of a batch: g(θ, κ) = Jᵀ(κ ⊙ ℓ′).


TRAININGS_AT_ONCE = 16
"""Number of training runs that `vmap` vectorizes at once. More would not be faster."""


def gradient(
    rerun: Rerun,
    weights: Float[Tensor, " weight"],
    share: Float[Tensor, " row"],
    rows: Int[Tensor, " row"],
) -> Float[Tensor, " weight"]:
    """Return the gradient g(θ, κ) = Jᵀ(κ ⊙ ℓ′) of the examples
    in `rows`. `share` is κ."""
    inputs = rerun.inputs[rows]
    outputs, pullback = vjp(lambda vector: rerun.outputs(vector, inputs), weights)[:2]
    output_gradient = rerun.loss.output_gradient(outputs, rerun.targets[rows])
    weight_gradient: Tensor = pullback(share[:, None] * output_gradient)[0]
    return weight_gradient


# --- The stored weights and optimizer states of two training runs, at each step.
#
# Frame s of each run is [θ_s, optimizer state after step s]. The store is an unnamed
# temporary file, whose size is reserved on the disk first. The operating system deletes
# the file when no process has it open any more, even if a process is killed.


WEIGHTS = "weights"


@dataclass(frozen=True)
class TrajectoryStore:
    """Storage for the steps (frames) of two training runs. Each frame consists of the
    arrays in `parts`, in this order."""

    parts: tuple[str, ...]
    frames: NDArray[Any]  # [frame, part, run, weight]
    device: torch.device

    def write(
        self, step: int, vectors: Mapping[str, Float[Tensor, "run weight"]]
    ) -> None:
        """Write some parts of a frame, for both training runs."""
        for index, part in enumerate(self.parts):
            if part in vectors:
                self.frames[step, index] = vectors[part].detach().cpu().numpy()

    def read(self, step: int, part: str, run: int) -> Float[Tensor, " weight"]:
        """Read a part of a frame, for one training run."""
        numbers = np.array(self.frames[step, self.parts.index(part), run])
        return torch.from_numpy(numbers).to(self.device)


def create_store(
    parts: tuple[str, ...], frames: int, like: Float[Tensor, " weight"], folder: Path
) -> TrajectoryStore:
    """Create an empty `TrajectoryStore` in a folder. Raise if the disk is too full."""
    needed = bytes_of(parts, frames, like)
    require_disk(folder, needed, "two recorded trainings")
    shape = (frames, len(parts), 2, len(like))
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, needed)
        memory = np.memmap(file, like.cpu().numpy().dtype, "r+", shape=shape)
        return TrajectoryStore(parts, memory, like.device)


def bytes_of(
    parts: tuple[str, ...], frames: int, like: Float[Tensor, " weight"]
) -> int:
    """Return the size in bytes of the file of a `TrajectoryStore`."""
    return frames * len(parts) * 2 * like.numel() * like.element_size()


# --- Several training runs in parallel.
#
# All begin at the same weights and use the same batches, so they
# differ only in the weights of the examples.


class RetrainedStep(NamedTuple):
    """One step of several training runs that are retrained in parallel."""

    step: int
    # the weights before the step, and the optimizer's state after it
    recorded: Mapping[str, Float[Tensor, "run weight"]]
    weights: Float[Tensor, "run weight"]  # the weights after the step


def retrain(
    rerun: Rerun, weight: Float[Tensor, "run train"]
) -> Iterator[RetrainedStep]:
    """Train with each row of example weights in parallel, and yield each step."""
    flat = rerun.flat
    weights = flat.vector(rerun.start).expand(len(weight), -1)
    memory: Memory = {}
    for step in range(rerun.length):
        # factor of loss i in the batch: κᵢ = c tᵢ wᵢ, if example i was drawn tᵢ times,
        # has weight wᵢ, and the mean has the factor c
        drawn = rerun.batch(step)
        weighted = drawn.weighted(weight)
        share = weighted * rerun.mean_factor(drawn, weighted)[:, None]

        # g = Σᵢ κᵢ∇ℓᵢ in each run
        batch_gradient = partial(gradient, rerun, rows=drawn.rows)
        with torch.no_grad(), plain_kernels():
            gradients = batched_map(
                batch_gradient, weights, share, chunk_size=TRAININGS_AT_ONCE
            )

        weights_before = weights
        weights, memory = next_state(rerun, step, weights, gradients, memory)
        parts = {name: flat.vector(dict(part)) for name, part in memory.items()}
        yield RetrainedStep(step, {WEIGHTS: weights_before, **parts}, weights)


def next_state(
    rerun: Rerun,
    step: int,
    weights: Float[Tensor, "run weight"],
    gradient: Float[Tensor, "run weight"],
    memory: Memory,
) -> tuple[Float[Tensor, "run weight"], Memory]:
    """Return the weights and the optimizer's state after a step
    of all training runs."""
    flat = rerun.flat
    # clip the gradient of each run
    factors = [rerun.optimizer.clipping(flat.weights(row)) for row in gradient]
    clipped = gradient * gradient.new_tensor(factors)[:, None]

    sizes = sizes_of(rerun.start, rerun.factors, rerun.step_size_at(step))
    after, new_memory = rerun.optimizer.update(
        step, flat.weights(weights), flat.weights(clipped), sizes, memory
    )
    return flat.vector(after), new_memory


def trained(
    rerun: Rerun, weight: Float[Tensor, "run train"]
) -> Float[Tensor, "run weight"]:
    """Train with each row of example weights,
    and return the final weights of the network."""
    weights = rerun.flat.vector(rerun.start).expand(len(weight), -1)
    for step in retrain(rerun, weight):
        weights = step.weights
    return weights


# --- The training of an experiment, as a `Rerun`.


def rerun_of(
    experiment: Experiment, problem: Problem, step_size: float, length: int
) -> Rerun:
    """Return the training of an experiment as a `Rerun` of `length` steps.

    `step_size` is multiplied by the factor of the schedule. Raise if the data come in
    phases, or if the run attributes a measure of the outputs."""
    if experiment.switches:
        raise Mistake(
            f"data={experiment.data.option} is learned in phases, and retraining "
            "without some examples does not support phases; "
            "load_run(RUN).contributions.by_phase holds the contributions of each "
            "phase"
        )
    if not experiment.path.explains_outputs:
        raise Mistake(
            f"path.measure={experiment.path.measure.option}: trainings without examples are "
            "compared by their outputs; run it with path.measure=output"
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
        budget=experiment.budget,
        renormalises=experiment.path.mean == "renormalised",
    )


# --- The outputs after retraining, at some points.


@dataclass(frozen=True)
class RerunAt(AbstractRetraining):
    """Retraining of a run. The results are the outputs
    `outs` at the points `inputs`."""

    rerun: Rerun
    inputs: Float[Tensor, " point *shape"]
    outs: Sequence[int] | None = None  # indices of the outputs; None means all
    # final weights of the original run, if available
    end: Float[Tensor, " weight"] | None = None

    @property
    def unit_weights(self) -> Float[Tensor, " example"]:
        return self.rerun.unit_weights

    @property
    def seed(self) -> int:
        return self.rerun.seed

    @property
    def original_outputs(self) -> Float[Tensor, "point out"]:
        assert self.end is not None
        return self.outputs_at(self.end)

    def outputs_at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        with torch.no_grad(), plain_kernels():
            outputs = self.rerun.outputs(end, self.inputs)
        if self.outs is None:
            return outputs
        return outputs[:, list(self.outs)]

    def final_weights(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """Train in parallel, as far as memory allows.
        Yield the final weights of each run."""
        for part in torch.split(weights, self.rerun.directions):
            yield from trained(self.rerun, part)

    def refuse_other_end(
        self,
        repeated: Float[Tensor, "point out"],
        changes: Float[Tensor, "group point out"],
    ) -> None:
        """Do nothing: ntkexp repeats its own training, so both are the same."""

    def rounding_remarks(
        self,
        repeated: Float[Tensor, "point out"],
        changes: Float[Tensor, "group point out"],
    ) -> list[str]:
        if self.end is None:  # the original outputs are unknown
            return []
        return super().rounding_remarks(repeated, changes)


# --- One of the two training runs in a `TrajectoryStore`, in the form that backward
# passes read.


@dataclass(frozen=True, kw_only=True)
class StoredTraining(AbstractRecordedTraining):
    """Training run number `run` of a `TrajectoryStore`, with its example weights."""

    rerun: Rerun
    store: TrajectoryStore
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
        return self.rerun.step_size_at(index)

    def frame(self, index: int) -> Frame:
        """Read the weights before a step, and the optimizer's state after the step."""
        parts = {
            part: self.store.read(index, part, self.run) for part in self.store.parts
        }
        weights = parts.pop(WEIGHTS)
        return Frame(
            weights, {part: self.flat.weights(vector) for part, vector in parts.items()}
        )

    def batch(self, index: int) -> TakenBatch:
        """Return the batch with one row for each distinct example."""
        drawn = self.rerun.batch(index)
        weighted = drawn.weighted(self.weight)
        factor = self.rerun.mean_factor(drawn, weighted)
        inputs = self.rerun.inputs[drawn.rows]
        targets = self.rerun.targets[drawn.rows]
        return TakenBatch(
            examples=drawn.rows,
            shares=weighted * factor,
            losses=partial(losses, self.rerun, inputs, targets),
            is_mean=self.rerun.loss.reduction == "mean",
            per_weight=drawn.times * factor,
        )


def losses(
    rerun: Rerun, inputs: Tensor, targets: Tensor, weights: Float[Tensor, " weight"]
) -> Float[Tensor, " row"]:
    """Return the losses ℓᵢ of some examples.

    They do not include the scale of the loss, because the shares κᵢ include it.
    """
    return rerun.loss.value(rerun.outputs(weights, inputs), targets)


# --- A removal: store training runs with and without a group, and split the difference.


def store_trajectories(
    rerun: Rerun, weight: Pair, folder: Path, progress: AbstractProgress
) -> TrajectoryStore:
    """Train with each of two sets of example weights, and store all steps in a
    `TrajectoryStore` in `folder`.

    Raise if the optimizer has no exact difference rules.
    """
    optimizer = rerun.optimizer
    if optimizer.records and optimizer.denominator_at(0) is None:
        raise Mistake(
            f"optimizer={optimizer.option} scales gradients by past gradients, and exact "
            "differences of such steps are known only for Adam, AdamW and RMSprop"
        )
    parts = (WEIGHTS, *dict.fromkeys((*optimizer.records, *optimizer.differentiated)))
    start = rerun.flat.vector(rerun.start)
    store = create_store(parts, rerun.length + 1, start, folder)
    store.write(0, {WEIGHTS: start.expand(2, -1)})
    progress.start("again", rerun.length, 0)
    for retrained in retrain(rerun, torch.stack(tuple(weight))):
        store.write(retrained.step, retrained.recorded)
        store.write(retrained.step + 1, {WEIGHTS: retrained.weights})
        progress.step(retrained.step + 1)
    return store


def pair_of(rerun: Rerun, store: TrajectoryStore, weight: Pair) -> TrainingPair:
    """Return both training runs of a `TrajectoryStore`. Raise if one diverged."""
    first = StoredTraining(rerun=rerun, store=store, run=0, weight=weight.first)
    second = StoredTraining(rerun=rerun, store=store, run=1, weight=weight.second)
    for name, training in (("as it was", first), ("without these examples", second)):
        if not training.end.isfinite().all():
            raise Mistake(
                f"training {name} diverges, so there is no change to split; choose a smaller step "
                "size"
            )
    return TrainingPair(
        first=first,
        second=second,
        weights=weight,
        mean=MEANS["renormalised" if rerun.renormalises else "fixed"],
        vectors_per_pass=max(1, SWEEP_CACHE_NUMBERS // rerun.flat.size),
        start_step=first_difference(rerun, weight),
    )


def first_difference(rerun: Rerun, weight: Pair) -> int:
    """Return the first step whose batch contains an example with different weights in
    the two runs. If there is none, return the number of steps."""
    for step in range(rerun.length):
        drawn = rerun.batch(step)
        if not torch.equal(drawn.weighted(weight.first), drawn.weighted(weight.second)):
            return step
    return rerun.length


GRADIENTS_AT_ONCE = 16
"""Number of outputs per backward pass for the gradients at the end of training."""


def breakdown_between(
    rerun: Rerun,
    weight: Pair,
    inputs: Float[Tensor, " point *shape"],
    chosen: Int[Tensor, "chosen 2"],
    folder: Path,
    progress: AbstractProgress,
) -> Breakdown:
    """Train with each of two sets of example weights, and split the difference of some
    outputs among examples and steps.

    Each row of `chosen` is the index of a point and the index of an output.
    """

    def outputs(
        chosen: Int[Tensor, "some 2"], weights: Float[Tensor, " weight"]
    ) -> Float[Tensor, " some"]:
        return rerun.outputs(weights, inputs)[chosen[:, 0], chosen[:, 1]]

    try:
        pair = pair_of(
            rerun, store_trajectories(rerun, weight, folder, progress), weight
        )
        groups = torch.split(chosen, rerun.directions)
        parts = [
            ChosenOutputs([partial(outputs, group)], GRADIENTS_AT_ONCE)
            for group in groups
        ]
        return split_change(pair, parts, progress)
    finally:
        progress.stop()
