"""An experiment is carried out in a run folder: begun, resumed from its checkpoint, finished, drawn.

provenance.json, timings.csv, progress.json   what the clock and the machine say
checkpoint.pt                                 where the run stands; gone when it is finished
everything else                               the same bytes each time, at the same number of threads
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.circumstances import provenance, settle
from ntkexp.config.build import build
from ntkexp.experiment import Experiment
from ntkexp.identity import canonical, folder_name
from ntkexp.machine.base import Prediction
from ntkexp.machine.ladder import results
from ntkexp.mistake import Mistake
from ntkexp.observe import Observer, Row
from ntkexp.prepare import Setting, prepare
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import being_written
from ntkexp.records.contributions import write_contributions
from ntkexp.records.data import write_data
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import create_kernels, finish_kernels, write_array, write_snapshot
from ntkexp.records.metrics import MetricsWriter
from ntkexp.records.predictions import write_predictions
from ntkexp.records.results import write_results
from ntkexp.records.timings import MACHINE, write_timings
from ntkexp.report.plots.gallery import save as save_plots
from ntkexp.report.run import read_run
from ntkexp.run import AbstractJournal, Outcome, Walk, begin, finish

CHECKPOINT = "checkpoint.pt"
SAME_BYTES = (
    "config.json",
    "data.npz",
    "metrics.csv",
    "results.csv",
    "predictions.zarr",
    "kernels.zarr",
    "contributions.zarr",
)


def carry_out(
    experiment: Experiment, overrides: Sequence[str], out: Path, force: bool, progress: AbstractProgress
) -> Path:
    """The folder of the finished run, new, resumed, or found as it was."""
    folder = RunFolder(out / "runs" / folder_name(experiment))
    if folder.done and not force:
        progress.say(f"{folder.path} is finished; --force runs it again")
        return folder.path
    with folder.claim():
        saved = None if force else load(folder)
        if saved is None:
            folder.clear()
            folder.write_json("config.json", canonical(experiment))
            folder.write("overrides.txt", "".join(f"{override}\n" for override in overrides))
        conduct(experiment, folder, saved, progress)
    return folder.path


def resume(path: Path, progress: AbstractProgress, trusted: tuple[str, ...] = ()) -> Path:
    """The rest of a run, from its own config."""
    folder = RunFolder(path)
    if not (path / "config.json").is_file():
        raise Mistake(f"{path} is no run folder: it has no config.json")
    if folder.done:
        progress.say(f"{path} is finished")
        return path
    experiment = build(folder.read_json("config.json"), trusted)
    expected = folder_name(experiment)
    if expected[-12:] != path.resolve().name[-12:]:
        raise Mistake(f"{path} was made by another version, or its data changed since: run the experiment anew")
    with folder.claim():
        conduct(experiment, folder, load(folder), progress)
    return path


def load(folder: RunFolder) -> dict[str, Any] | None:
    """The checkpoint of a dead run, if it left one."""
    path = folder.path / CHECKPOINT
    if not path.is_file():
        return None
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved


def conduct(
    experiment: Experiment, folder: RunFolder, saved: dict[str, Any] | None, progress: AbstractProgress
) -> None:
    """Run, with everything that happens kept in the folder."""
    threads = settle(experiment, saved["threads"] if saved else None)
    folder.write_json("provenance.json", provenance(experiment, threads))
    clock = Clock()
    try:
        with clock.times("prepare"):
            setting = prepare(experiment)
        walk = begin(setting)
        if saved:
            walk.restore(saved["walk"])
        with (
            interruptions() as stop,
            journal(folder, setting, saved, threads, progress, stop) as log,
            clock.times("run"),
        ):
            outcome = finish(walk, log)
        with clock.times("write"):
            write(folder, setting, outcome)
        with clock.times("draw"):
            save_plots(read_run(folder.path), folder.path / "plots")
    except (Exception, KeyboardInterrupt):
        folder.write("error.txt", traceback.format_exc())
        raise
    finally:
        progress.stop()
    conclude(folder, setting, outcome, clock)


@dataclass
class Clock:
    """Seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def times(self, what: str) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - start


@contextmanager
def interruptions() -> Iterator[list[int]]:
    """A list that a first Ctrl-C (or SIGTERM) is put into, so that a step can be finished; a second one interrupts."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Journal(AbstractJournal):
    """Keeps rows, kernels and checkpoints in a run folder."""

    folder: RunFolder
    setting: Setting
    metrics: MetricsWriter
    threads: int
    progress: AbstractProgress
    stop: list[int]
    snapshots: int = 0
    drift: float | None = None
    saved_at: float = field(default_factory=time.monotonic)
    shown_at: float = 0.0

    def row(self, row: Row) -> None:
        self.metrics.write(row)
        self.drift = row.get("drift") or self.drift

    def snapshot(self, step: int, kernel: Float[Tensor, "point out train out_"]) -> None:
        read = array(kernel[self.setting.read])
        write_snapshot(self.folder.path / "kernels.zarr", self.snapshots, step, read)
        self.snapshots += 1

    def stepped(self, walk: Walk, loss: float) -> None:
        self.progress.step(walk.step, loss, self.drift)
        now = time.monotonic()
        if now - self.shown_at >= 1.0:
            self.shown_at = now
            steps = self.setting.experiment.steps
            self.folder.write_json("progress.json", {"step": walk.step, "steps": steps, "loss": loss})
        if self.stop or now - self.saved_at >= self.setting.experiment.checkpoint_seconds:
            self.save(walk)
            self.saved_at = time.monotonic()
        if self.stop:
            raise KeyboardInterrupt

    def save(self, walk: Walk) -> None:
        """The checkpoint; what it counts is on disk before it."""
        state = {
            "walk": walk.state,
            "threads": self.threads,
            "snapshots": self.snapshots,
            "metrics": self.metrics.position,
        }
        with being_written(self.folder.path / CHECKPOINT) as file:
            torch.save(state, file)


@contextmanager
def journal(
    folder: RunFolder,
    setting: Setting,
    saved: dict[str, Any] | None,
    threads: int,
    progress: AbstractProgress,
    stop: list[int],
) -> Iterator[Journal]:
    """The journal of a run, open where it was left."""
    steps, points = setting.experiment.steps, setting.points
    if saved is None:
        planned = setting.experiment.path.snapshots(steps)
        write_data(folder.path / "data.npz", arrays(setting))
        outputs = setting.targets.shape[1]
        read = len(points.inputs[setting.read])
        create_kernels(folder.path / "kernels.zarr", read, outputs, points.train, planned)
    progress.start(folder.path.name, steps, len(saved["walk"]["step_sizes"]) if saved else 0)
    columns = Observer(setting).columns
    with MetricsWriter(folder.path / "metrics.csv", columns, saved["metrics"] if saved else None) as metrics:
        yield Journal(folder, setting, metrics, threads, progress, stop, saved["snapshots"] if saved else 0)


def write(folder: RunFolder, setting: Setting, outcome: Outcome) -> None:
    """What came out, file by file."""
    path, evidence, read = folder.path, outcome.evidence, setting.read
    kernels = path / "kernels.zarr"
    finish_kernels(kernels)
    for name, integral in evidence.paths.items():
        write_array(kernels, f"path_{name}", array(integral.kernel[read]))
    parts = {name: array(integral.contributions[read]) for name, integral in evidence.paths.items()}
    write_contributions(path / "contributions.zarr", parts, outcome.parts)
    predicted = {rung.name: rung.outcome.outputs for rung in outcome.rungs if isinstance(rung.outcome, Prediction)}
    outputs = {"f_0": evidence.start, "f_T": evidence.end, **predicted}
    write_predictions(path / "predictions.zarr", {name: array(value[read]) for name, value in outputs.items()})
    table = results(outcome.rungs, outcome.places, evidence, bool(setting.data.classes))
    write_results(path / "results.csv", table)
    with being_written(path / "weights.pt") as file:
        torch.save({"start": setting.weights, "end": outcome.weights}, file)


def conclude(folder: RunFolder, setting: Setting, outcome: Outcome, clock: Clock) -> None:
    """The timings, and the word that the run is finished."""
    machines = {MACHINE + rung.name: rung.seconds for rung in outcome.rungs}
    write_timings(folder.path / "timings.csv", clock.seconds | machines)
    for leftover in (CHECKPOINT, "error.txt"):
        (folder.path / leftover).unlink(missing_ok=True)
    pictures = sorted(f"plots/{file.name}" for file in (folder.path / "plots").iterdir())
    folder.finish(
        [*SAME_BYTES, *pictures],
        outcome=outcome.sentence,
        diverged=outcome.diverged,
        steps=outcome.steps,
        step_size=setting.descent.step_size,
        largest_stable_step=setting.largest_stable_step,
    )


def arrays(setting: Setting) -> dict[str, np.ndarray[Any, Any]]:
    """The examples of every split, for `data.npz`."""
    classes = len(setting.data.classes)
    found: dict[str, np.ndarray[Any, Any]] = {"classes": np.array(setting.data.classes, dtype=str)}
    for name in ("train", "probe", "test"):
        split = getattr(setting.data, name)
        found |= {f"{name}_{part}": getattr(split, part).numpy() for part in ("shown", "inputs", "target", "index")}
        found[f"{name}_targets"] = setting.experiment.loss.targets(split.target, classes).numpy()
    return found


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as a numpy array."""
    return tensor.detach().cpu().numpy()
