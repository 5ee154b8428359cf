"""A listener that keeps what it hears in the run folder as it happens, with checkpoints; Ctrl-C lets a step be
finished; and what came out of it, written down file by file.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import PathKernel, Prediction
from ntkexp.on_disk import RowsOfArray
from ntkexp.path.integrals import ComponentSums, StepTotals
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import Json, being_written, sealed
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
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import (
    KERNELS,
    finish_kernels,
    snapshot_chunks,
    write_path_kernel,
    write_predictions,
    write_snapshot,
)
from ntkexp.records.results import RETRACED, MetricsWriter, write_results
from ntkexp.report.live_log import LiveLog
from ntkexp.run.environment import Clock
from ntkexp.run.loop import AbstractListener, Way
from ntkexp.run.metrics import SHARE_COLUMNS, Observer, Row
from ntkexp.run.outcome import ChangesByPhase, Outcome
from ntkexp.run.setting import Setting
from ntkexp.run.state import METRICS, TRAJECTORY, Checkpoint, RunState, save
from ntkexp.shapes import Weights

# --- A first Ctrl-C (or SIGTERM) lets a step be finished and its checkpoint be written; a second one interrupts.


@dataclass
class Interrupt:
    """Whether the run was asked to stop, and whether its last step is behind."""

    asked: bool = False
    over: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        if self.asked or self.over:
            raise KeyboardInterrupt
        self.asked = True

    def end(self) -> None:
        """There are no more steps to finish."""
        self.over = True
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Both signals go to the interrupt, and afterwards to their previous handlers."""
    interrupt = Interrupt()
    before = {
        number: signal.signal(number, interrupt.receive)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- What came out of a run, written down file by file: the same bytes each time, but for the weights' container.


def write_outcome(folder: RunFolder, setting: Setting, outcome: Outcome) -> None:
    """What came out, file by file."""
    path, evidence, read = folder.path, outcome.evidence, setting.domain.read
    # 𝒦 of each rule, behind the snapshots that were written on the way
    kernels = path / "kernels.zarr"
    finish_kernels(kernels)
    for name, integral in evidence.paths.items():
        if (
            evidence.keeps_kernels and evidence.measured is None
        ):  # which has no kernel of pairs of outputs
            attributed = evidence.attributed[read].nonzero()[:, 0].tolist()
            write_path_kernel(
                kernels, name, to_numpy(integral.kernel), attributed, evidence.integrated
            )
    # 𝒮 and 𝒟 of each rule, what happened in each phase, and effects
    decays = bool(setting.experiment.optimizer.weight_decay)
    parts = {
        name: contributions_by_rule(
            integral,
            outcome.by_step[name],
            outcome.by_component.get(name),
            outcome.steps,
            decays=decays,
        )
        for name, integral in evidence.paths.items()
    }
    examples = setting.problem.data.train.index.tolist()
    write_contributions(path / "contributions.zarr", parts, examples, evidence.integrated)
    if outcome.phases is not None:
        add_phases(
            path / "contributions.zarr", phases_of(setting, outcome.phases, read, decays=decays)
        )
    if outcome.effects is not None:
        add_effect(
            path / "contributions.zarr",
            to_numpy(outcome.effects.values[read]),
            outcome.effects.facts,
        )
        if outcome.effects.check is not None:
            write_leave_out(path / STORE, outcome.effects.check)
    # f_0, f_T and f̂ of each machine, or the measure of them that the path was integrated of, and the ladder
    predicted = {
        rung.name: rung.outcome.outputs
        for rung in outcome.rungs
        if isinstance(rung.outcome, Prediction) and rung.outcome.through is evidence.measured
    }
    outputs = {
        "f_0": evidence.explained(evidence.start),
        "f_T": evidence.explained(evidence.end),
        **predicted,
    }
    write_predictions(
        path / "predictions.zarr", {name: to_numpy(value[read]) for name, value in outputs.items()}
    )
    write_results(path / "results.csv", outcome.ladder)
    with being_written(path / "weights.pt") as file:
        torch.save(end_weights(setting.problem.weights, outcome.weights), file)


def end_weights(start: Weights, end: Weights) -> dict[str, Weights]:
    """The weights of both ends by the same names, for pickle writes again what is equal but not the same: a run that
    went on from its last step would differ in its bytes.
    """
    return {"start": start, "end": {name: end[name] for name in start}}


def contributions_by_rule(
    integral: PathKernel,
    totals: StepTotals,
    shares: ComponentSums | None,
    steps: int,
    *,
    decays: bool,
) -> ContributionsByRule:
    """The arrays of a rule at the points that were read, on a path of `steps` steps."""
    by_component = None
    if shares is not None:
        parts, by_step = to_numpy(shares.parts), to_numpy(shares.totals.stacked().movedim(0, 2))
        by_component = ByComponent(list(shares.components), parts, to_numpy(shares.decay), by_step)
    return ContributionsByRule(
        parts=RowsOfArray(integral.contributions),
        decay=to_numpy(integral.decay) if decays else None,
        rounding=None
        if integral.rounding is None or not integral.rounding.any()
        else to_numpy(integral.rounding),
        half_by=None if integral.half_by is None else to_numpy(integral.half_by),
        by_step=ByStep(to_numpy(totals.stacked().movedim(0, 2)), totals.until(steps)),
        by_component=by_component,
        facts=integral.facts,
    )


def phases_of(
    setting: Setting, phases: ChangesByPhase, read: slice, *, decays: bool
) -> ContributionsByPhase:
    """What happened in each phase at the points that were read."""
    problem, points = setting.problem, np.zeros(len(setting.problem.targets), dtype=np.int64)
    for places in problem.phases.values():
        for number, place in enumerate(places, start=1):
            points[place] = number
    return ContributionsByPhase(
        names=problem.data.phases,
        examples=points[: problem.train],
        points=points[read],
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


def data_arrays(setting: Setting) -> dict[str, np.ndarray[Any, Any]]:
    """The examples of every split, for `data.npz`."""
    classes = len(setting.problem.data.classes)
    found: dict[str, np.ndarray[Any, Any]] = {
        "classes": np.array(setting.problem.data.classes, dtype=str)
    }
    if setting.measured is not None:
        found[OUT_NAME] = np.array([setting.measured.name], dtype=str)
    for name in ("train", "probe", "test"):
        split = getattr(setting.problem.data, name)
        found |= {
            f"{name}_{part}": getattr(split, part).numpy()
            for part in ("shown", "inputs", "target", "index")
        }
        found[f"{name}_targets"] = setting.experiment.loss.targets(split.target, classes).numpy()
        if split.phase is not None:
            found[f"{name}_phase"] = split.phase.numpy() + 1
    if setting.problem.data.phases:
        found["phases"] = np.array(setting.problem.data.phases, dtype=str)
    if setting.problem.data.phase_classes:
        found["phase_classes"] = np.array(setting.problem.data.phase_classes, dtype=str)
    return found


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().numpy()


PATIENCE = 20
"""How often as long as it took to save sums on disk nothing is saved: so checkpoints take a twentieth of the time."""


@dataclass(kw_only=True)
class FolderListener(AbstractListener):
    """Keeps rows, kernels and checkpoints in a run folder, as they come."""

    folder: RunFolder
    setting: Setting
    metrics: MetricsWriter
    of: str  # the run's identity
    threads: int
    progress: AbstractProgress
    clock: Clock
    interrupt: Interrupt
    log: LiveLog | None = None
    log_keys: dict[str, str] = field(default_factory=dict)  # by which logs are continued
    snapshots: dict[str, tuple[int, str]] = field(default_factory=dict)  # the seals of their files
    taken: int = 0  # how many snapshots
    rows: Trajectory | None = None
    way: Way | None = None  # the reverse pass at work
    drift: float | None = None
    saved_at: float = field(default_factory=time.monotonic)
    took: float = 0.0  # to save
    shown_at: float = 0.0

    def on_row(self, row: Row) -> None:
        self.metrics.write(row)
        if self.log is not None:
            self.log.write_row(row)
        self.drift = row.get("drift") or self.drift

    def on_snapshot(
        self,
        step: int,
        kernel: Float[Tensor, "point kept train kept_"],
        output_gradient: Float[Tensor, "train out_"],
    ) -> None:
        read, gradient = to_numpy(kernel[self.setting.domain.read]), to_numpy(output_gradient)
        write_snapshot(self.folder.path / KERNELS, self.taken, step, read, gradient)
        self.snapshots |= sealed(self.folder.path, snapshot_chunks(self.folder.path, self.taken))
        self.taken += 1

    def on_step(self, state: RunState, loss: float) -> None:
        drift = "" if self.drift is None else f"  drift {self.drift:.3g}"
        self.progress.step(state.step, f"loss {loss:.3g}{drift}")
        self.show({"step": state.step, "steps": self.setting.experiment.steps, "loss": loss})
        self.checkpoint(state)

    def on_step_back(self, state: RunState, way: Way, done: int, total: int) -> None:
        if self.way != way:
            self.way = way
            self.progress.start(f"{self.folder.path.name}, {way}", total, done - 1)
        self.progress.step(done)
        self.show({"step": state.step, "steps": self.setting.experiment.steps, way: done})
        self.checkpoint(state)

    def on_remark(self, text: str) -> None:
        self.progress.say(text)

    def on_late_rows(self, rows: Sequence[Row]) -> None:
        with MetricsWriter(self.folder.path / RETRACED, ("step", *SHARE_COLUMNS)) as shares:
            for row in rows:
                shares.write(row)

    def on_end(self) -> None:
        self.interrupt.end()

    @property
    def scratch(self) -> Path:
        return self.folder.path

    def trajectory(self, rows: int, size: int) -> Trajectory:
        kind, domain = self.setting.experiment.dtype, self.setting.domain
        self.rows = Trajectory(self.folder.path / TRAJECTORY, rows, size, kind, self.of)
        self.rows.allocate()
        if self.setting.experiment.integration.passes == 1:
            self.progress.say(f"the trajectory is kept, in {self.rows.room / 1e9:.2g} GB")
        else:
            self.progress.say(
                f"this optimizer remembers: {len(domain.attributed)} points (path.attributed) are attributed by a "
                f"second pass, {domain.chunk} at a time, over a trajectory of {self.rows.room / 1e9:.2g} GB"
            )
        return self.rows

    def show(self, state: dict[str, Json]) -> None:
        """Keep progress.json, once a second."""
        if time.monotonic() - self.shown_at >= 1.0:
            self.shown_at = time.monotonic()
            self.folder.write_sealed("progress.json", state)

    def checkpoint(self, state: RunState) -> None:
        """Save now and then, and when the run is asked to stop; after one of sums on disk, which takes long, so much
        later that most of the time is the run's.
        """
        interval = self.setting.experiment.checkpoint_seconds
        if self.setting.domain.spills:
            interval = max(interval, PATIENCE * self.took)
        if self.interrupt.asked or time.monotonic() - self.saved_at >= interval:
            begun = time.monotonic()
            self.save(state)
            self.saved_at = time.monotonic()
            self.took = self.saved_at - begun
        if self.interrupt.asked:
            raise KeyboardInterrupt

    def save(self, state: RunState) -> None:
        """The checkpoint; what it counts is on disk before it."""
        if self.rows is not None:
            self.rows.secure()
        held = {
            "run": state.state,
            "threads": self.threads,
            "took": astuple(self.clock.whole),
            "snapshots": self.taken,
            "seals": self.snapshots | {METRICS: self.metrics.mark},
            "logs": self.log_keys,
        }
        save(self.folder, held, state.step, self.of)


def log_keys_of(saved: Checkpoint | None) -> dict[str, str]:
    """The keys of the logs that a run had until its checkpoint."""
    return dict(saved.get("logs", {})) if saved else {}


@contextmanager
def listen(
    folder: RunFolder,
    setting: Setting,
    saved: Checkpoint | None,
    of: str,
    threads: int,
    progress: AbstractProgress,
    clock: Clock,
    log: LiveLog | None = None,
) -> Iterator[FolderListener]:
    """The listener of a run, which goes on where it was left."""
    columns, seals = Observer(setting).columns, dict(saved["seals"]) if saved else {}
    metrics_bytes = seals.pop(METRICS)[0] if saved else None
    log_keys = log_keys_of(saved) | ({} if log is None else {log.name: log.key})
    progress.start(
        folder.path.name, setting.experiment.steps, len(saved["run"]["step_sizes"]) if saved else 0
    )
    with (
        deferred_interrupt() as interrupt,
        MetricsWriter(folder.path / METRICS, columns, metrics_bytes) as metrics,
    ):
        yield FolderListener(
            folder=folder,
            setting=setting,
            metrics=metrics,
            of=of,
            threads=threads,
            progress=progress,
            clock=clock,
            interrupt=interrupt,
            log=log,
            log_keys=log_keys,
            snapshots=seals,
            taken=saved["snapshots"] if saved else 0,
        )
