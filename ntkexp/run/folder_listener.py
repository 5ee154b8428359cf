"""A listener that writes the run folder: metrics, kernels and checkpoints during
training, and the results after it.

After a first Ctrl-C, the current step is completed and a checkpoint is written.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.capacity import require_disk
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import identity
from ntkexp.machine.base import PathKernel, Prediction
from ntkexp.mistake import Mistake
from ntkexp.model.functional import named_members, save_tensors
from ntkexp.on_disk import RowsOfArray
from ntkexp.path.integrals import ComponentSums, StepTotals
from ntkexp.path.points import NetworkView
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import Json, being_written, sealed, size_of
from ntkexp.records.contributions import (
    STORE,
    ByComponent,
    ByStep,
    ContributionsByPhase,
    ContributionsByRule,
    add_effect,
    add_phases,
    write_contributions,
    write_leave_out,
)
from ntkexp.records.data import OUT_NAME, Trajectory
from ntkexp.records.diagnostics import (
    COLUMN,
    DIAGNOSTICS,
    create_diagnostics,
)
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import (
    KERNELS,
    finish_arrays,
    finish_kernels,
    write_arrays,
    write_path_kernel,
    write_predictions,
    write_snapshot,
)
from ntkexp.records.recorded import (
    NUMBER_BYTES,
    RECORDED,
    create_recorded,
    recorded_numbers,
)
from ntkexp.records.results import RETRACED, MetricsWriter, write_results
from ntkexp.report.live_log import LiveLog
from ntkexp.run.diagnose import Measurements, measure_at_start
from ntkexp.run.environment import Clock
from ntkexp.run.loop import AbstractListener, BackwardPass
from ntkexp.run.metrics import SHARE_COLUMNS, Observer, Row
from ntkexp.run.outcome import ChangesByPhase, Outcome
from ntkexp.run.setting import Setting
from ntkexp.run.state import METRICS, TRAJECTORY, Checkpoint, RunState, save
from ntkexp.shapes import Weights

# --- A request to execute an experiment in a run folder.


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """An experiment, the folder of its run, and the settings of its execution."""

    experiment: Experiment
    folder: RunFolder
    overrides: Sequence[str]
    repeat: str  # the command that repeats the run
    progress: AbstractProgress
    pictures: bool = True
    # largest number of threads; None means the number of cores
    most_threads: int | None = None
    # name of the logger in `LOGS` that receives metrics during the run
    log: str | None = None


# --- Ctrl-C or SIGTERM: the first signal ends the run after the current step and a
# checkpoint. A second signal ends the run immediately.


@dataclass
class Interrupt:
    """The Ctrl-C and SIGTERM signals that were received."""

    is_requested: bool = False  # True after the first signal was received
    # True after the last step, when signals have their usual effect again
    is_disabled: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. The first signal requests a stop after the current step. The
        second signal raises KeyboardInterrupt."""
        if self.is_requested or self.is_disabled:
            raise KeyboardInterrupt
        self.is_requested = True

    def end(self) -> None:
        """Stop deferring signals, because all steps are complete.
        Raise if one was received."""
        self.is_disabled = True
        if self.is_requested:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Yield an `Interrupt` that receives SIGINT and SIGTERM inside the `with` block."""
    interrupt = Interrupt()
    previous = {
        number: signal.signal(number, interrupt.receive)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --- The results of a run.
#
# They are byte-identical in each repetition, except for the zip container of
# weights.pt.


def write_outcome(folder: RunFolder, setting: Setting, outcome: Outcome) -> None:
    path = folder.path
    read = setting.domain.summed_points
    write_kernels(path / "kernels.zarr", setting, outcome)
    for store in (DIAGNOSTICS, RECORDED):
        finish_arrays(path / store)
    write_contributions_of_run(path, setting, outcome)

    # Write the outputs f_0 and f_T of the network, and the outputs of each kernel
    # machine. If the run explains a measure, write its values at these outputs instead.
    matrices = outcome.matrices
    outputs = {
        "f_0": matrices.explained(matrices.start),
        "f_T": matrices.explained(matrices.end),
    }
    for machine in outcome.machines:
        if (
            isinstance(machine.outcome, Prediction)
            and machine.outcome.measure is matrices.measured
        ):
            outputs[machine.name] = machine.outcome.outputs
    predictions = {name: to_numpy(value[read]) for name, value in outputs.items()}
    write_predictions(path / "predictions.zarr", predictions)

    write_results(path / "results.csv", outcome.results)
    problem = setting.problem
    with being_written(path / "weights.pt") as file:
        state = state_dicts(problem.module, problem.weights, outcome.weights)
        save_tensors(state, file)


def write_kernels(path: Path, setting: Setting, outcome: Outcome) -> None:
    """Add the path kernel of each quadrature rule to the store of snapshots."""
    matrices = outcome.matrices
    finish_kernels(path)
    # A path kernel relates pairs of outputs. If the run explains a measure instead of
    # the outputs, there is no path kernel.
    if not matrices.keeps_kernels or matrices.measured is not None:
        return
    attributed = (
        matrices.attributed[setting.domain.summed_points].nonzero()[:, 0].tolist()
    )
    for name, integral in matrices.paths.items():
        kernel = to_numpy(integral.kernel)
        write_path_kernel(path, name, kernel, attributed, matrices.integrated)


def write_contributions_of_run(path: Path, setting: Setting, outcome: Outcome) -> None:
    """Write the contributions of each quadrature rule, in total and by phase,
    and the leave-out effects."""
    store = path / "contributions.zarr"
    matrices = outcome.matrices
    read = setting.domain.summed_points
    decays = bool(setting.experiment.optimizer.weight_decay)
    parts = {
        name: contributions_by_rule(
            integral,
            outcome.by_step[name],
            outcome.by_component.get(name),
            outcome.steps,
            decays=decays,
        )
        for name, integral in matrices.paths.items()
    }
    examples = setting.problem.data.train.index.tolist()
    write_contributions(store, parts, examples, matrices.integrated)
    if outcome.phases is not None:
        add_phases(store, phases_of(setting, outcome.phases, read, decays=decays))
    if outcome.effects is not None:
        add_effect(store, to_numpy(outcome.effects.values[read]), outcome.effects.facts)
        if outcome.effects.check is not None:
            write_leave_out(path / STORE, outcome.effects.check)


def state_dicts(module: nn.Module, start: Weights, end: Weights) -> dict[str, Weights]:
    """Return the state dicts of the network before and after training, with identical
    string objects as names. The trained weights come first.

    pickle writes a string object once, and later refers to it. After a resumption,
    equal names may be different objects, and pickle would write them twice. The bytes
    of the file would then depend on interruptions of the run."""
    starts = dict(start)
    ends = {name: end[name] for name in start}
    # frozen parameters, buffers, and further names of shared weights
    first_names: dict[Tensor, str] = {
        weight: name for name, weight in module.named_parameters()
    }
    members = dict(named_members(module, all_names=True))
    try:
        stored = module.state_dict().keys()  # without buffers that are not persistent
    except TypeError:  # the user's module has a state_dict without the usual arguments
        stored = members.keys()
    for name, value in members.items():
        constant = value.detach()
        # a file with subclasses of tensors cannot be loaded without running code
        if name in start or name not in stored or type(constant) is not Tensor:
            continue
        first_name = first_names.get(value, name)
        starts[name] = starts.get(first_name, constant)
        ends[name] = ends.get(first_name, constant)
    return {"start": starts, "end": ends}


def contributions_by_rule(
    integral: PathKernel,
    totals: StepTotals,
    shares: ComponentSums | None,
    steps: int,
    *,
    decays: bool,
) -> ContributionsByRule:
    """Return the arrays that are written for one quadrature rule.

    `totals` are the changes of the outputs by step, `shares` the sums by component, and
    `steps` the number of training steps."""
    by_component = None
    if shares is not None:
        by_component = ByComponent(
            list(shares.components),
            to_numpy(shares.parts),
            to_numpy(shares.decay),
            to_numpy(shares.totals.stacked().movedim(0, 2)),
        )
    rounding = integral.rounding
    if rounding is not None and not rounding.any():
        rounding = None
    return ContributionsByRule(
        parts=RowsOfArray(integral.contributions),
        decay=to_numpy(integral.decay) if decays else None,
        rounding=None if rounding is None else to_numpy(rounding),
        half_by=None if integral.half_by is None else to_numpy(integral.half_by),
        by_step=ByStep(
            to_numpy(totals.stacked().movedim(0, 2)), totals.clipped_edges(steps)
        ),
        by_component=by_component,
        facts=integral.facts,
    )


def phases_of(
    setting: Setting, phases: ChangesByPhase, read: slice, *, decays: bool
) -> ContributionsByPhase:
    """Return the changes and contributions of each phase at the queries."""
    problem = setting.problem
    phase_of_point = np.zeros(len(problem.targets), dtype=np.int64)
    for slices in problem.phases.values():
        for number, points in enumerate(slices, start=1):
            phase_of_point[points] = number
    return ContributionsByPhase(
        names=problem.data.phases,
        examples=phase_of_point[: problem.train],
        points=phase_of_point[read],
        change=to_numpy(phases.change[:, read]),
        parts={
            rule: [share.contributions for share in shares]
            for rule, shares in phases.shares.items()
        },
        decay={
            rule: to_numpy(torch.stack([share.decay for share in shares]))
            for rule, shares in (phases.shares.items() if decays else ())
        },
    )


def prepare_recording(path: Path, setting: Setting, capacity: int) -> None:
    """Create the store of the arrays that `path.record` names. If it names none, do
    nothing. Raise if the disk has too little space."""
    names = setting.experiment.path.record
    if not names:
        return
    read = setting.domain.summed_points
    points = (len(setting.problem.targets[read]), setting.problem.outputs)
    shapes = {name: tuple(w.shape) for name, w in setting.problem.weights.items()}
    numbers = recorded_numbers(names, points, shapes)
    written = size_of(path) or 0
    require_disk(
        path.parent,
        NUMBER_BYTES * numbers * capacity - written,
        f"the {' and '.join(names)} of {capacity} steps",
        "lower path.count, or leave weights out of path.record",
    )
    create_recorded(path, names, points, shapes, capacity)


def recorded_arrays(
    setting: Setting, view: NetworkView
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that `path.record` names, at the weights of `view`."""
    arrays = dict[str, np.ndarray[Any, Any]]()
    for name in setting.experiment.path.record:
        if name == "outputs":
            arrays[name] = to_numpy(view.outputs[setting.domain.summed_points])
        else:
            parts = (view.weights[key] for key in setting.problem.weights)
            arrays[name] = np.concatenate([to_numpy(part).ravel() for part in parts])
    return arrays


def data_arrays(setting: Setting) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of data.npz: the examples of each split."""
    data = setting.problem.data
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "classes": np.array(data.classes, dtype=str)
    }
    if setting.measured is not None:
        arrays[OUT_NAME] = np.array([setting.measured.name], dtype=str)
    for name in ("train", "query", "test"):
        split = getattr(data, name)
        for part in ("shown", "inputs", "target", "index"):
            arrays[f"{name}_{part}"] = getattr(split, part).numpy()
        targets = setting.experiment.loss.targets(split.target, len(data.classes))
        arrays[f"{name}_targets"] = targets.numpy()
        if split.phase is not None:
            arrays[f"{name}_phase"] = split.phase.numpy() + 1
    if data.phases:
        arrays["phases"] = np.array(data.phases, dtype=str)
    if data.phase_classes:
        arrays["phase_classes"] = np.array(data.phase_classes, dtype=str)
    return arrays


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().numpy()


CHECKPOINT_PAUSE = 20
"""Minimum time between checkpoints of sums on disk, in multiples of the time that the
last checkpoint took."""


@dataclass(kw_only=True)
class FolderListener(AbstractListener):
    """A listener that writes metrics, kernels and checkpoints to a run folder."""

    folder: RunFolder
    setting: Setting
    metrics: MetricsWriter
    identity: str  # the run's identity
    threads: int
    progress: AbstractProgress
    clock: Clock
    interrupt: Interrupt
    first_measurements: Measurements  # the values of the diagnostics before training
    log: LiveLog | None = None
    # the key of each log, with which a resumed run continues it, by the log's name
    log_keys: dict[str, str] = field(default_factory=dict)
    # the size and digest (seal) of each file of the snapshots
    snapshot_seals: dict[str, tuple[int, str]] = field(default_factory=dict)
    snapshots: int = 0  # number of complete snapshots
    rows: Trajectory | None = None  # the recorded steps, for a backward pass
    # the kind of the current backward pass, if there is one
    backward_pass: BackwardPass | None = None
    kernel_change: float | None = None
    # time of the last checkpoint
    saved_at: float = field(default_factory=time.monotonic)
    save_seconds: float = 0.0  # time to write the last checkpoint
    progress_written_at: float = 0.0  # time when progress.json was last written

    def on_row(self, row: Row) -> None:
        self.metrics.write(row)
        if self.log is not None:
            self.log.write_row(row)
        self.kernel_change = row.get("kernel_change") or self.kernel_change

    def on_snapshot(
        self,
        step: int,
        kernel: Float[Tensor, "point kept train kept_"],
        output_gradient: Float[Tensor, "train out_"],
    ) -> None:
        store = self.folder.path / KERNELS
        read = to_numpy(kernel[self.setting.domain.summed_points])
        gradient = to_numpy(output_gradient)
        chunks = write_snapshot(store, self.snapshots, step, read, gradient)
        self.seal_chunks(KERNELS, chunks)

    def on_record(self, step: int, view: NetworkView) -> None:
        arrays = recorded_arrays(self.setting, view)
        if arrays:
            self.write_arrays(RECORDED, step, arrays)

    def on_diagnostics(self, step: int, measured: Measurements) -> None:
        self.refuse_new_names(step, measured)
        if measured.arrays:
            arrays = {name: to_numpy(array) for name, array in measured.arrays.items()}
            self.write_arrays(DIAGNOSTICS, step, arrays)
        self.snapshots += 1

    def write_arrays(
        self, store: str, step: int, arrays: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Write the arrays of a snapshot to a store of the run."""
        path = self.folder.path / store
        self.seal_chunks(store, write_arrays(path, self.snapshots, step, arrays))

    def seal_chunks(self, store: str, chunks: Sequence[str]) -> None:
        """Compute the digests (seals) of written chunks, for the next checkpoint."""
        names = [f"{store}/{chunk}" for chunk in chunks]
        self.snapshot_seals |= sealed(self.folder.path, names)

    def refuse_new_names(self, step: int, measured: Measurements) -> None:
        """Raise if the names of the values, or the shapes of the arrays, are not as
        before training."""
        first = self.first_measurements
        if (
            measured.numbers.keys() == first.numbers.keys()
            and measured.shapes == first.shapes
        ):
            return
        odd = sorted(measured.numbers.keys() ^ first.numbers.keys())
        odd += sorted(
            name for name, _ in measured.shapes.items() ^ first.shapes.items()
        )
        raise Mistake(
            f"diagnostics: at step {step}, {odd[0].removeprefix(COLUMN)} has another shape than "
            "before training, or exists only at one of them; return the same names with the same "
            "shapes at every step, and None or NaN where a value is undefined"
        )

    def on_step(self, state: RunState, loss: float) -> None:
        kernel_change = (
            ""
            if self.kernel_change is None
            else f"  kernel change {self.kernel_change:.3g}"
        )
        self.progress.step(state.step, f"loss {loss:.3g}{kernel_change}")
        self.write_progress(
            {"step": state.step, "steps": self.setting.experiment.steps, "loss": loss}
        )
        self.checkpoint(state)

    def on_step_back(
        self, state: RunState, backward_pass: BackwardPass, done: int, total: int
    ) -> None:
        if self.backward_pass != backward_pass:
            self.backward_pass = backward_pass
            self.progress.start(
                f"{self.folder.path.name}, {backward_pass}", total, done - 1
            )
        self.progress.step(done)
        self.write_progress(
            {
                "step": state.step,
                "steps": self.setting.experiment.steps,
                backward_pass: done,
            }
        )
        self.checkpoint(state)

    def on_remark(self, text: str) -> None:
        self.progress.say(text)

    def on_late_rows(self, rows: Sequence[Row]) -> None:
        with MetricsWriter(
            self.folder.path / RETRACED, ("step", *SHARE_COLUMNS)
        ) as shares:
            for row in rows:
                shares.write(row)

    def on_end(self) -> None:
        self.interrupt.end()
        self.progress.after_steps("comparing kernel machines …")

    @property
    def scratch(self) -> Path:
        return self.folder.path

    def trajectory(self, rows: int, size: int) -> Trajectory:
        domain = self.setting.domain
        dtype = self.setting.experiment.dtype
        self.rows = Trajectory(
            self.folder.path / TRAJECTORY, rows, size, dtype, self.identity
        )
        self.rows.allocate()
        if self.setting.experiment.integration.passes > 1:
            self.progress.say(
                f"this optimizer has memory: a second pass attributes {len(domain.attributed)} "
                "points (path.attributed)"
            )
        return self.rows

    def write_progress(self, state: dict[str, Json]) -> None:
        """Write progress.json, at most once a second. If a stop was requested, write it
        now, because this is the last step."""
        is_due = time.monotonic() - self.progress_written_at >= 1.0
        if is_due or self.interrupt.is_requested:
            self.progress_written_at = time.monotonic()
            self.folder.write_sealed("progress.json", state)

    def checkpoint(self, state: RunState) -> None:
        """Write a checkpoint if one is due or if a stop was requested.

        If the sums are on disk, a checkpoint takes long to write, so checkpoints are
        rare. If a stop was requested, raise KeyboardInterrupt after the checkpoint."""
        interval = self.setting.experiment.checkpoint_seconds
        if self.setting.domain.spills:
            interval = max(interval, CHECKPOINT_PAUSE * self.save_seconds)
        if self.interrupt.is_requested or time.monotonic() - self.saved_at >= interval:
            start = time.monotonic()
            self.save(state)
            self.saved_at = time.monotonic()
            self.save_seconds = self.saved_at - start
        if self.interrupt.is_requested:
            raise KeyboardInterrupt

    def save(self, state: RunState) -> None:
        """Write a checkpoint. First force the recorded steps to the disk, if any."""
        if self.rows is not None:
            self.rows.secure()
        state_and_seals = {
            "run": state.state,
            "threads": self.threads,
            "took": astuple(self.clock.total),
            "snapshots": self.snapshots,
            "seals": self.snapshot_seals | {METRICS: self.metrics.size_and_digest},
            "logs": self.log_keys,
        }
        save(self.folder, state_and_seals, state.step, self.identity)


def log_keys_of(saved: Checkpoint | None) -> dict[str, str]:
    """Return the key of each live log (W&B, MLflow, …) by the log's name. A resumed run
    continues its logs with these keys."""
    return dict(saved.get("logs", {})) if saved else {}


@contextmanager
def listen(
    request: RunRequest,
    setting: Setting,
    saved: Checkpoint | None,
    threads: int,
    clock: Clock,
    log: LiveLog | None = None,
) -> Iterator[FolderListener]:
    """Yield the listener of a run that starts,
    or that continues from the checkpoint `saved`."""
    folder = request.folder
    progress = request.progress
    seals = {}
    metrics_bytes = None
    steps_done = 0
    if saved is not None:
        seals = dict(saved["seals"])
        metrics_bytes = seals.pop(METRICS)[0]
        steps_done = len(saved["run"]["step_sizes"])
    log_keys = log_keys_of(saved)
    if log is not None:
        log_keys[log.name] = log.key
    progress.start(folder.path.name, setting.experiment.steps, steps_done)
    first = measure_at_start(setting)
    capacity = setting.experiment.timetable().capacity
    create_diagnostics(folder.path / DIAGNOSTICS, first.shapes, capacity)
    prepare_recording(folder.path / RECORDED, setting, capacity)
    columns = (*Observer(setting).columns, *first.numbers)
    with (
        deferred_interrupt() as interrupt,
        MetricsWriter(folder.path / METRICS, columns, metrics_bytes) as metrics,
    ):
        yield FolderListener(
            folder=folder,
            setting=setting,
            metrics=metrics,
            identity=identity(request.experiment),
            threads=threads,
            progress=progress,
            clock=clock,
            interrupt=interrupt,
            first_measurements=first,
            log=log,
            log_keys=log_keys,
            snapshot_seals=seals,
            snapshots=saved["snapshots"] if saved else 0,
        )
