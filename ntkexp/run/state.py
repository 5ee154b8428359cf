"""The state of an unfinished run: weights, accumulated sums, and the checkpoint.

The *closing rule* is a quadrature rule whose contributions add up to the change of the
outputs in every step, such as the secant rule."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev
from torch.utils._pytree import tree_map

from ntkexp.capacity import require_disk
from ntkexp.effects.sweep import ChunkedSweep
from ntkexp.kernel import Closure
from ntkexp.model.functional import load_tensors, save_tensors
from ntkexp.on_disk import RowsInFile, blocks, is_on_disk
from ntkexp.optimizer.base import Memory
from ntkexp.path.domain import Domain
from ntkexp.path.forward_sum import AbstractAccumulator, PhasedSum
from ntkexp.path.integrals import Tally
from ntkexp.path.recording import (
    AllocateRows,
    RecordedTraining,
    Recording,
    new_recording,
)
from ntkexp.path.settings import AbstractTimetable
from ntkexp.path.step import Step
from ntkexp.records.atomic import (
    Damaged,
    Sealing,
    Seals,
    being_sealed,
    being_written,
    damaged_files,
    sealed_for,
)
from ntkexp.records.folder import BEGUN, CHECKPOINT, CONFIG, OVERRIDES, RunFolder
from ntkexp.report.live_log import event_files
from ntkexp.run.diagnose import RunDiagnostics
from ntkexp.run.setting import Setting, SweepSetting
from ntkexp.shapes import Weights
from ntkexp.text import several

# --- The backward passes of the leave-out effects over the recorded steps
# (`effects.sweep`).
#
# The attributed points are split into chunks whose adjoints fit into memory. Each chunk
# needs one pass over the whole recording.


@dataclass(kw_only=True)
class EffectsPass:
    """The backward passes that compute leave-out effects, over the recorded steps of a
    run."""

    setting: Setting
    sweep_setting: SweepSetting
    recording: Recording
    # True if this pass writes the recording;
    # False if the pass of the path integrals writes it
    writes: bool
    effects: Float[Tensor, "attributed integrated train"]
    sweeps: ChunkedSweep | None = None
    # state from a checkpoint; it is used when `steps_back` begins
    saved: Mapping[str, Any] | None = None

    def add(self, step: Step) -> None:
        if self.writes:
            self.recording.write(step)

    def steps_back(
        self, end: Weights, step_sizes: Sequence[float]
    ) -> Iterator[tuple[int, int]]:
        """Run the remaining backward passes.

        After each step, yield the number of completed steps and the number of all
        steps.
        """
        if self.writes:
            self.recording.close(len(step_sizes), end)
        path = self.setting.experiment.path
        training = RecordedTraining(
            recording=self.recording,
            descent=self.setting.descent,
            step_sizes=step_sizes,
        )
        self.sweeps = ChunkedSweep(
            training=training,
            end_gradients=partial(self.end_gradients, training),
            points_per_chunk=self.sweep_setting.plan.points_per_chunk,
            outputs_per_pass=self.sweep_setting.plan.outputs_per_pass,
            kind=path.effects,
            mean=path.mean,
            effects=self.effects,
        )
        if self.saved is not None:
            self.sweeps.restore(self.saved)
        yield from self.sweeps.steps_back()

    def end_gradients(
        self, training: RecordedTraining, chunk: slice
    ) -> Float[Tensor, "vector weight"]:
        """Return the gradients ∂F/∂θ_T for a chunk of points. Each output F of each
        point has a row."""
        network = self.setting.points
        outputs = list(self.setting.domain.integrated)

        def outputs_at(weights: Tensor, point_input: Tensor) -> Tensor:
            values: Tensor = network.reader.function(
                training.flat.weights(weights), point_input
            )
            return values[0, outputs]

        points = self.sweep_setting.points[chunk]
        return torch.cat(
            [
                jacrev(outputs_at)(training.end, network.inputs[[int(point)]])
                for point in points
            ]
        )

    @property
    def growth(self) -> float:
        """The largest norm of the adjoint during training,
        relative to its norm at the end."""
        return float("inf") if self.sweeps is None else self.sweeps.growth

    @property
    def state(self) -> Mapping[str, Any]:
        if self.sweeps is not None:
            return self.sweeps.state
        return self.saved or {
            "done": 0,
            "effects": self.effects,
            "sizes": None,
            "sweep": None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Store the state of a checkpoint, with which `steps_back` will begin."""
        self.saved = state


# --- Sums that do not fit into memory. Each checkpoint copies these sums to files
# sums-STEP-NUMBER.bin.
#
# The files are complete before their checkpoint is written. They are removed after the
# next checkpoint is written. So after a kill at any moment, the latest checkpoint has
# all its files.


SUM_FILES = "sums-*.bin"
FILE_KEY = "kept in"
"""The key of a dict that replaces an array in a checkpoint. Its value is the name of
the file with the array."""


def save_sums(folder: Path, step: int, state: Any) -> tuple[Any, Seals]:
    """Copy those arrays of a state that are stored on disk to files of the checkpoint
    at this step.

    Return the state with file names in place of these arrays, and the sizes and digests
    (seals) of the files."""
    seals: dict[str, tuple[int, str]] = {}

    def saved(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and is_on_disk(leaf)):
            return leaf
        name = f"sums-{step}-{len(seals)}.bin"
        seals[name] = write_rows(folder / name, leaf)
        return {
            FILE_KEY: name,
            "shape": list(leaf.shape),
            "kind": leaf[:0].numpy().dtype.name,
        }

    return tree_map(saved, state), seals


def write_rows(path: Path, numbers: Tensor) -> tuple[int, str]:
    """Write an array to a file, block by block.
    Return the size and the digest (seal) of the file."""
    sealing = Sealing()
    with being_written(path) as file:
        for block in blocks(numbers):
            content = block.contiguous().numpy().data
            file.write(content)
            sealing.update(content)
    return sealing.size_and_digest


def load_sums(folder: Path, state: Any) -> Any:
    """Replace the file names in a state by arrays that are read on demand."""

    def loaded(leaf: Any) -> Any:
        if not is_file_name(leaf):
            return leaf
        return RowsInFile(
            folder / leaf[FILE_KEY], tuple(leaf["shape"]), np.dtype(leaf["kind"])
        )

    return tree_map(loaded, state, is_leaf=is_file_name)


def is_file_name(part: Any) -> bool:
    return isinstance(part, dict) and FILE_KEY in part


def drop_sums(folder: Path, but: Collection[str] = ()) -> None:
    for path in folder.glob(SUM_FILES):
        if path.name not in but:
            path.unlink()


# --- checkpoint.pt: the state of an unfinished run, and the seals of all files that the
# rest of the run uses.
#
# `run.folder_listener` decides when to write a checkpoint. The seal of checkpoint.pt is
# a digest of its bytes and of the identity of the run. `load` verifies all seals first.
# So a resumed run either has byte-identical results, or starts again.


TRAJECTORY = "trajectory.bin"
METRICS = "metrics.csv"

BEGINNING = (CONFIG, OVERRIDES, "data.npz")
"""The files that are written before the first step."""

CHECKPOINT_KEYS = {"run", "threads", "snapshots", "seals", "sums"}

Checkpoint: TypeAlias = Mapping[str, Any]
"""The content of a checkpoint: the state of a run as plain data and tensors, and the
digests (seals) of files."""


def save(folder: RunFolder, state: Checkpoint, step: int, identity: str) -> None:
    """Write a checkpoint of the run with identity `identity`.

    `state["seals"]` must contain the digests (seals) of the files
    that the rest of the run uses."""
    run, sums = save_sums(folder.path, step, state["run"])
    with being_sealed(folder.path / CHECKPOINT, identity) as file:
        save_tensors({**state, "run": run, "sums": sums}, file)
    drop_sums(folder.path, sums)


def load(folder: RunFolder, identity: str) -> Checkpoint | None:
    """Return the checkpoint, or None if there is none. Remove all files and rows that
    were written after the checkpoint.

    Raise `Damaged` if a file does not match its digest (seal).
    """
    path = folder.path / CHECKPOINT
    if not path.is_file():
        return None

    # check the checkpoint and the files that precede the first step
    if not sealed_for(path, identity):
        refuse(folder, [CHECKPOINT])
    refuse(folder, folder.damaged_files(*BEGINNING))
    state: Checkpoint = load_tensors(path, mmap=True)
    if CHECKPOINT_KEYS - state.keys():
        refuse(folder, [CHECKPOINT])

    # remove the rows after the checkpoint, because the resumed run writes them again
    seals: Seals = {**state["seals"], **state["sums"]}
    metrics = folder.path / METRICS
    size = seals[METRICS][0]
    if metrics.is_file() and metrics.stat().st_size > size:
        os.truncate(metrics, size)

    refuse(folder, damaged_files(folder.path, seals))
    folder.forget(
        [CHECKPOINT, TRAJECTORY, BEGUN, *BEGINNING, *seals, *event_files(folder.path)]
    )
    return {**state, "run": load_sums(folder.path, state["run"])}


def refuse(folder: RunFolder, damaged: list[str]) -> None:
    """Raise `Damaged` if the list of damaged files is not empty."""
    if damaged:
        raise Damaged(
            f"{folder.path} is damaged: {several(damaged)} not as it was written"
        )


# --- The state of a run after some training steps.


@dataclass(kw_only=True)
class RunState:
    """The state of a run after `step` training steps:
    its weights and all accumulated sums."""

    setting: Setting
    weights: Weights
    accumulator: AbstractAccumulator
    timetable: AbstractTimetable
    summed_gradient: Float[Tensor, "train out"]
    diagnostics: RunDiagnostics
    memory: Memory = field(default_factory=dict)
    step_sizes: list[float] = field(default_factory=list)
    clippings: list[float] = field(default_factory=list)
    # steps at which the closing rule misses the change of the outputs
    misses: dict[int, Closure] = field(default_factory=dict)
    # the outputs f at the beginning of each phase
    phase_outputs: list[Float[Tensor, "point out"]] = field(default_factory=list)
    effects: EffectsPass | None = None

    @property
    def step(self) -> int:
        return len(self.step_sizes)

    @property
    def time(self) -> float:
        """The training time so far, Σ_s η_s."""
        return sum(self.step_sizes, start=0.0)

    def advance(self, step: Step, *, due: bool) -> dict[str, Tally]:
        """Add one training step. Return the norms of its terms, as a `Tally` for each
        quadrature rule. The dict is empty if no norms are measured at this step.

        `due` is True if a kernel snapshot is due at the step.
        """
        if step.index in self.setting.domain.switches:
            self.phase_outputs.append(step.view.outputs.clone())
        tallies = self.accumulator.add(step, due=due)
        if self.effects is not None:
            self.effects.add(step)
        self.summed_gradient += step.impulse
        self.step_sizes.append(step.step_size)
        self.clippings.append(step.clipping)
        self.weights = step.end
        self.memory = step.memory
        self.check(step.index, tallies)
        return tallies

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Run the backward pass of the path integrals, if they need one.

        After each step, yield the number of completed steps and the number
        of all steps."""
        yield from self.accumulator.steps_back(self.weights, self.step_sizes)
        for step, tallies in enumerate(self.accumulator.backward_tallies or ()):
            self.check(step, tallies)

    def check(self, step: int, tallies: Mapping[str, Tally]) -> None:
        """Record the step in `misses` if the contributions of the closing rule miss the
        change of the outputs by more than the bound on the rounding error.
        """
        closing = self.setting.experiment.path.closing_rule
        if closing is None or closing.option not in tallies:
            return
        miss = tallies[closing.option].closure_error(self.setting.rounding)
        if miss is not None:
            self.misses[step] = miss

    @property
    def state(self) -> dict[str, Any]:
        misses = {
            step: (closure.error, closure.bound)
            for step, closure in self.misses.items()
        }
        return {
            "weights": self.weights,
            "memory": dict(self.memory),
            "accumulator": self.accumulator.state,
            "timetable": self.timetable.state,
            "summed_gradient": self.summed_gradient,
            "step_sizes": self.step_sizes,
            "clippings": self.clippings,
            "misses": misses,
            "turns": self.phase_outputs,
            "effects": None if self.effects is None else self.effects.state,
            "diagnostics": self.diagnostics.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        device = self.summed_gradient.device
        self.weights, self.memory = tree_map(
            lambda leaf: leaf.to(device), (state["weights"], state["memory"])
        )
        self.accumulator.restore(state["accumulator"])
        self.timetable.restore(state["timetable"])
        self.summed_gradient.copy_(state["summed_gradient"])
        self.step_sizes = list(state["step_sizes"])
        self.clippings = list(state["clippings"])
        self.misses = {
            step: Closure(*numbers) for step, numbers in state["misses"].items()
        }
        self.phase_outputs = [outputs.to(device) for outputs in state["turns"]]
        self.diagnostics.restore(state["diagnostics"])
        if self.effects is not None:
            self.effects.restore(state["effects"])


def spilled_bytes(setting: Setting) -> int:
    """Return the disk space for sums that do not fit into memory, in bytes.

    There are up to three copies of the sums: the current sums, their copy in the latest
    checkpoint, and the copy that is being written (the next checkpoint or the
    results)."""
    experiment = setting.experiment
    phases = len(experiment.switches) + 1
    rules = len(experiment.path.rule)
    summed = rules * phases + bool(experiment.path.finer_quadrature)
    results = rules * (1 + phases if phases > 1 else 1)
    numbers = (2 * summed + max(summed, results)) * prod(setting.domain.shape[:3])
    return numbers * torch.float64.itemsize


def begin(
    setting: Setting, allocate: AllocateRows, scratch: Path | None = None
) -> RunState:
    """Return the state before the first step.

    `allocate` creates the storage for the recorded steps, which a backward pass reads.
    Sums that do not fit into memory are stored in the folder `scratch`."""
    experiment = setting.experiment
    weights = setting.problem.weights
    domain = replace(setting.domain, scratch=scratch if setting.domain.spills else None)
    if domain.scratch is not None:
        saved_bytes = sum(
            path.stat().st_size for path in domain.scratch.glob(SUM_FILES)
        )
        require_disk(
            domain.scratch,
            spilled_bytes(setting) - saved_bytes,
            "contributions, their checkpoints and results",
            "raise memory_gb, lower data.train, data.query or data.test",
        )
    accumulator = experiment.integration.begin(domain, weights, allocate)
    if setting.domain.switches and experiment.integration.passes == 1:
        accumulator = PhasedSum(
            accumulator=accumulator, switches=setting.domain.switches
        )
    return RunState(
        setting=setting,
        weights=weights,
        accumulator=accumulator,
        timetable=experiment.timetable(),
        summed_gradient=torch.zeros_like(setting.descent.targets),
        diagnostics=RunDiagnostics(setting),
        effects=effects_pass(setting, domain, accumulator, allocate),
    )


def effects_pass(
    setting: Setting,
    domain: Domain,
    accumulator: AbstractAccumulator,
    allocate: AllocateRows,
) -> EffectsPass | None:
    """Return the backward passes of the leave-out effects. Return None if no effects
    are requested, or if they are computed by retraining."""
    sweep = setting.sweep
    if sweep is None or sweep.retrains:
        return None
    recording = accumulator.recorded()
    writes = recording is None
    if recording is None:
        records = setting.experiment.optimizer.differentiated
        recording = new_recording(
            domain.steps,
            setting.problem.weights,
            records,
            domain.zero_output_gradient(),
            allocate,
        )
    return EffectsPass(
        setting=setting,
        sweep_setting=sweep,
        recording=recording,
        writes=writes,
        effects=domain.like.new_zeros(
            len(sweep.points), len(domain.integrated), setting.points.train
        ),
    )
