"""Where a run stands on its path, what it has accumulated, and the checkpoint that says so."""

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

from ntkexp.effects.sweep import ChunkedSweep
from ntkexp.kernel.secant.segment import Closure
from ntkexp.model.functional import load_tensors
from ntkexp.on_disk import RowsInFile, blocks, is_on_disk, refuse_small_disk
from ntkexp.optimizer.base import Memory
from ntkexp.path.forward_sum import AbstractAccumulator, Marked
from ntkexp.path.integrals import Tally
from ntkexp.path.recording import RecordedTraining, Recording, Room, new_recording
from ntkexp.path.settings import AbstractTimetable
from ntkexp.path.step import Step
from ntkexp.records.atomic import (
    Damaged,
    Sealing,
    Seals,
    being_sealed,
    being_written,
    broken,
    sealed_for,
)
from ntkexp.records.folder import BEGUN, CHECKPOINT, CONFIG, OVERRIDES, RunFolder
from ntkexp.report.live_log import event_files
from ntkexp.run.setting import Setting, SweepSetting
from ntkexp.shapes import Weights
from ntkexp.text import several

# --- The effects of a run: what leaving each example out would change, found by sweeps back over its recorded steps.
#
# The attributed points are taken in chunks whose adjoints fit into memory;
# every chunk goes over the whole recording.


@dataclass(kw_only=True)
class EffectsPass:
    """The steps as they are recorded, and the sweeps over them, which are made when all of them are known."""

    setting: Setting
    asked: SweepSetting
    recording: Recording
    keeps: bool  # whether the steps are kept here, or by another who goes back over them
    effects: Float[Tensor, "attributed integrated train"]
    sweeps: ChunkedSweep | None = None
    saved: Mapping[str, Any] | None = None  # of a checkpoint

    def add(self, step: Step) -> None:
        """Take in a step that was taken."""
        if self.keeps:
            self.recording.write(step)

    def steps_back(self, end: Weights, step_sizes: Sequence[float]) -> Iterator[tuple[int, int]]:
        """Sweep back over what is left; how many steps are done of how many."""
        if self.keeps:
            self.recording.close(len(step_sizes), end)
        path = self.setting.experiment.path
        training = RecordedTraining(
            recording=self.recording, descent=self.setting.descent, step_sizes=step_sizes
        )
        self.sweeps = ChunkedSweep(
            training=training,
            end_gradients=partial(self.end_gradients, training),
            chunk=self.asked.plan.chunk,
            together=self.asked.plan.together,
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
        """∂F/∂θ_T of all outputs of some points, one after another."""
        read, outputs = self.setting.points, list(self.setting.domain.integrated)

        def outputs_at(weights: Tensor, one: Tensor) -> Tensor:
            found: Tensor = read.reader.function(training.flat.weights(weights), one)
            return found[0, outputs]

        points = self.asked.points[chunk]
        return torch.cat(
            [jacrev(outputs_at)(training.end, read.inputs[[int(point)]]) for point in points]
        )

    @property
    def growth(self) -> float:
        """How much more outputs feel of the weights at most than of those at the end."""
        return float("inf") if self.sweeps is None else self.sweeps.growth

    @property
    def state(self) -> Mapping[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        if self.sweeps is not None:
            return self.sweeps.state
        return self.saved or {"done": 0, "effects": self.effects, "sizes": None, "sweep": None}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.saved = state


# --- Sums that lie on disk are kept in files beside the checkpoint that names them: sums-STEP-NUMBER.bin.
#
# Every checkpoint has files of its own, which are there whole before it is, and those of the one before go when
# it is: a kill at any moment leaves a checkpoint with all of its files.


FILES = "sums-*.bin"
KEPT = "kept in"
"""The key of what stands in a checkpoint for numbers of another file."""


def save_sums(folder: Path, step: int, state: Any) -> tuple[Any, Seals]:
    """Write the part of a state that lies on disk, at a step; the state with names in its place, and their seals."""
    seals: dict[str, tuple[int, str]] = {}

    def kept(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and is_on_disk(leaf)):
            return leaf
        name = f"sums-{step}-{len(seals)}.bin"
        seals[name] = write_rows(folder / name, leaf)
        return {KEPT: name, "shape": list(leaf.shape), "kind": leaf[:0].numpy().dtype.name}

    return tree_map(kept, state), seals


def write_rows(path: Path, numbers: Tensor) -> tuple[int, str]:
    """Write numbers to a file, some rows at a time; the mark of the file."""
    sealing = Sealing()
    with being_written(path) as file:
        for block in blocks(numbers):
            content = block.contiguous().numpy().data
            file.write(content)
            sealing.take(content)
    return sealing.mark


def load_sums(folder: Path, state: Any) -> Any:
    """A state with what its names stand for, of which nothing is read yet."""

    def found(leaf: Any) -> Any:
        if not is_name(leaf):
            return leaf
        return RowsInFile(folder / leaf[KEPT], tuple(leaf["shape"]), np.dtype(leaf["kind"]))

    return tree_map(found, state, is_leaf=is_name)


def is_name(part: Any) -> bool:
    return isinstance(part, dict) and KEPT in part


def drop_sums(folder: Path, but: Collection[str] = ()) -> None:
    """Remove the sums of other checkpoints than that with these files."""
    for path in folder.glob(FILES):
        if path.name not in but:
            path.unlink()


# --- checkpoint.pt: where an unfinished run stands, and the seals of all files that the rest of it relies on.
#
# The contents are listed below, and `run.folder_listener` decides when a checkpoint is written.
#
# It is sealed for its run. Nothing is made of it before its own seal and theirs have been looked at: a run goes
# on to the same bytes, or begins anew.


TRAJECTORY, METRICS = "trajectory.bin", "metrics.csv"

BEGINNING = (CONFIG, OVERRIDES, "data.npz")
"""What is written before the first step."""

Checkpoint: TypeAlias = Mapping[str, Any]
"""A state in plain tensors and numbers, with the seals."""


def save(folder: RunFolder, state: Checkpoint, step: int, of: str) -> None:
    """Keep a state at a step; its `seals` are part of it."""
    run, sums = save_sums(folder.path, step, state["run"])
    with being_sealed(folder.path / CHECKPOINT, of) as file:
        torch.save({**state, "run": run, "sums": sums}, file)
    drop_sums(folder.path, sums)


def load(folder: RunFolder, of: str) -> Checkpoint | None:
    """The state that was kept, if one was, with the folder taken back to it; or `Damaged`."""
    path = folder.path / CHECKPOINT
    if not path.is_file():
        return None
    refuse(folder, folder.broken(*BEGINNING) if sealed_for(path, of) else [CHECKPOINT])
    state: Checkpoint = load_tensors(path, mmap=True)
    refuse(
        folder,
        [CHECKPOINT] if {"run", "threads", "snapshots", "seals", "sums"} - state.keys() else [],
    )
    seals: Seals = {**state["seals"], **state["sums"]}
    metrics, size = folder.path / METRICS, seals[METRICS][0]
    if metrics.is_file() and metrics.stat().st_size > size:
        os.truncate(metrics, size)  # lines behind the checkpoint are written again
    refuse(folder, broken(folder.path, seals))
    folder.forget([CHECKPOINT, TRAJECTORY, BEGUN, *BEGINNING, *seals, *event_files(folder.path)])
    return {**state, "run": load_sums(folder.path, state["run"])}


def refuse(folder: RunFolder, wrong: list[str]) -> None:
    """Refuse a folder whose files are not as they were written."""
    if wrong:
        raise Damaged(f"{folder.path} is damaged: {several(wrong)} not as it was written")


# --- Where a run stands on its path, and what it has accumulated so far.


@dataclass(kw_only=True)
class RunState:
    """A run after `step` steps is at these weights, with what was accumulated."""

    setting: Setting
    weights: Weights
    accumulator: AbstractAccumulator
    timetable: AbstractTimetable
    summed_gradient: Float[Tensor, "train out"]
    memory: Memory = field(default_factory=dict)
    step_sizes: list[float] = field(default_factory=list)
    clippings: list[float] = field(default_factory=list)
    misses: dict[int, Closure] = field(default_factory=dict)  # at steps that a rule should close
    turns: list[Float[Tensor, "point out"]] = field(
        default_factory=list
    )  # f where another phase begins
    effects: EffectsPass | None = None

    @property
    def step(self) -> int:
        return len(self.step_sizes)

    @property
    def time(self) -> float:
        """Σ_s η_s."""
        return sum(self.step_sizes, start=0.0)

    def advance(self, step: Step, *, due: bool) -> dict[str, Tally]:
        """Take one step, at which a kernel may be due; what it adds by each rule, if that was measured."""
        if step.index in self.setting.domain.switches:
            self.turns.append(step.view.outputs.clone())
        tallies = self.accumulator.add(step, due=due)
        if self.effects is not None:
            self.effects.add(step)
        self.summed_gradient += step.impulse
        self.step_sizes.append(step.step_size)
        self.clippings.append(step.clipping)
        self.weights, self.memory = step.end, step.memory
        self.check(step.index, tallies)
        return tallies

    def steps_back(self) -> Iterator[tuple[int, int]]:
        """Go back over the path, if it is integrated so; how many steps are done of how many."""
        yield from self.accumulator.steps_back(self.weights, self.step_sizes)
        for step, tallies in enumerate(self.accumulator.late_tallies or ()):
            self.check(step, tallies)

    def check(self, step: int, tallies: Mapping[str, Tally]) -> None:
        """Remember a step that is not closed, though its rule closes."""
        closing = self.setting.experiment.path.closing
        if closing is None or closing.option not in tallies:
            return
        found = tallies[closing.option].miss(self.setting.rounding)
        if found is not None:
            self.misses[step] = found

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "weights": self.weights,
            "memory": dict(self.memory),
            "accumulator": self.accumulator.state,
            "timetable": self.timetable.state,
            "summed_gradient": self.summed_gradient,
            "step_sizes": self.step_sizes,
            "clippings": self.clippings,
            "misses": {
                step: (closure.error, closure.bound) for step, closure in self.misses.items()
            },
            "turns": self.turns,
            "effects": None if self.effects is None else self.effects.state,
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
        self.misses = {step: Closure(*numbers) for step, numbers in state["misses"].items()}
        self.turns = [outputs.to(device) for outputs in state["turns"]]
        if self.effects is not None:
            self.effects.restore(state["effects"])


def spilled(setting: Setting) -> int:
    """Bytes on disk of sums that do not fit into the memory: as they are, in two checkpoints at the moment when one
    replaces the other, and as what the run leaves, before which there is one checkpoint less.
    """
    experiment, phases = setting.experiment, len(setting.experiment.switches) + 1
    rules = len(experiment.path.rule)
    summed, left = (
        rules * phases + bool(experiment.path.finer),
        rules * (1 + phases if phases > 1 else 1),
    )
    return (
        (2 * summed + max(summed, left)) * prod(setting.domain.shape[:3]) * torch.float64.itemsize
    )


def begin(setting: Setting, room: Room, scratch: Path | None = None) -> RunState:
    """The state before the first step; an integration that goes back takes room for its recording, and what does not
    fit into the memory lies in a folder, if there is one.
    """
    experiment, weights = setting.experiment, setting.problem.weights
    domain = replace(setting.domain, scratch=scratch if setting.domain.spills else None)
    if domain.scratch is not None:
        saved_bytes = sum(
            path.stat().st_size for path in domain.scratch.glob(FILES)
        )  # the sums of a checkpoint
        refuse_small_disk(domain.scratch, spilled(setting) - saved_bytes)
    accumulator, sweep = experiment.integration.begin(domain, weights, room), setting.sweep
    if setting.domain.switches and experiment.integration.passes == 1:
        accumulator = Marked(accumulator=accumulator, switches=setting.domain.switches)
    effects = None
    if sweep is not None and not sweep.retrains:
        recording = (
            accumulator.recorded()
        )  # steps are recorded for effects alone, unless they are anyway
        records, pull = experiment.optimizer.differentiated, domain.no_pull()
        effects = EffectsPass(
            setting=setting,
            asked=sweep,
            recording=recording or new_recording(domain.steps, weights, records, pull, room),
            keeps=recording is None,
            effects=domain.like.new_zeros(
                len(sweep.points), len(domain.integrated), setting.points.train
            ),
        )
    return RunState(
        setting=setting,
        weights=weights,
        accumulator=accumulator,
        timetable=experiment.timetable(),
        summed_gradient=torch.zeros_like(setting.descent.targets),
        effects=effects,
    )
