"""The diary: a journal that is kept in the run folder as things happen, with checkpoints and the first Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from jaxtyping import Float
from torch import Tensor

from ntkexp.progress import AbstractProgress
from ntkexp.records.folder import RunFolder
from ntkexp.records.json_file import Json
from ntkexp.records.kernels import KERNELS, snapshot_places, write_snapshot
from ntkexp.records.metrics import RETRACED, MetricsWriter
from ntkexp.records.seal import sealed
from ntkexp.records.trajectory import Trajectory
from ntkexp.run.checkpoint import METRICS, TRAJECTORY, State, save
from ntkexp.run.listener import AbstractJournal
from ntkexp.run.metrics import SHARE_COLUMNS, Observer, Row
from ntkexp.run.save import array
from ntkexp.run.second_pass import Retrace
from ntkexp.run.setting import Setting
from ntkexp.run.state import Walk


@dataclass
class Patience:
    """A first Ctrl-C (or SIGTERM) lets a step be finished and its checkpoint be written; a second one interrupts."""

    asked: bool = False  # to stop
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
def patience() -> Iterator[Patience]:
    """Patience with the steps of a run."""
    kept = Patience()
    before = {number: signal.signal(number, kept.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Diary(AbstractJournal):
    """Keeps rows, kernels and checkpoints in a run folder."""

    folder: RunFolder
    setting: Setting
    metrics: MetricsWriter
    of: str  # the run's identity
    threads: int
    progress: AbstractProgress
    patience: Patience
    snapshots: dict[str, tuple[int, str]] = field(default_factory=dict)  # the seals of their files
    taken: int = 0  # how many snapshots
    rows: Trajectory | None = None
    back: bool = False  # whether the run is on its way back
    drift: float | None = None
    saved_at: float = field(default_factory=time.monotonic)
    shown_at: float = 0.0

    def row(self, row: Row) -> None:
        self.metrics.write(row)
        self.drift = row.get("drift") or self.drift

    def snapshot(
        self, step: int, kernel: Float[Tensor, "point out train out_"], output_gradient: Float[Tensor, "train out_"]
    ) -> None:
        read, gradient = array(kernel[self.setting.read]), array(output_gradient)
        write_snapshot(self.folder.path / KERNELS, self.taken, step, read, gradient)
        self.snapshots |= sealed(self.folder.path, snapshot_places(self.taken))
        self.taken += 1

    def trajectory(self, rows: int, size: int) -> Trajectory:
        kind = self.setting.experiment.dtype
        self.rows = Trajectory(self.folder.path / TRAJECTORY, rows, size, kind, self.of)
        self.rows.take_room()
        setting = self.setting
        self.progress.say(
            f"this optimizer remembers: {len(setting.attributed)} points (path.attributed) are attributed by a second "
            f"pass, {setting.chunk} at a time, over a trajectory of {self.rows.room / 1e9:.2g} GB"
        )
        return self.rows

    def stepped(self, walk: Walk, loss: float) -> None:
        self.progress.step(walk.step, loss, self.drift)
        self.show({"step": walk.step, "steps": self.setting.experiment.steps, "loss": loss})
        self.checkpoint(walk, None)

    def walked(self) -> None:
        self.patience.end()

    def retraced(self, retrace: Retrace) -> None:
        if not self.back:
            self.back = True
            self.progress.start(f"{self.folder.path.name}, back", retrace.steps, retrace.done - 1)
        self.progress.step(retrace.done, None, None)
        self.show({"step": retrace.walk.step, "steps": self.setting.experiment.steps, "back": retrace.done})
        self.checkpoint(retrace.walk, retrace)

    def attributed(self, rows: Sequence[Row]) -> None:
        with MetricsWriter(self.folder.path / RETRACED, ("step", *SHARE_COLUMNS)) as shares:
            for row in rows:
                shares.write(row)

    def show(self, state: dict[str, Json]) -> None:
        """Keep progress.json, once a second."""
        if time.monotonic() - self.shown_at >= 1.0:
            self.shown_at = time.monotonic()
            self.folder.write_sealed("progress.json", state)

    def checkpoint(self, walk: Walk, retrace: Retrace | None) -> None:
        """Save now and then, and when the run is asked to stop."""
        if self.patience.asked or time.monotonic() - self.saved_at >= self.setting.experiment.checkpoint_seconds:
            self.save(walk, retrace)
            self.saved_at = time.monotonic()
        if self.patience.asked:
            raise KeyboardInterrupt

    def save(self, walk: Walk, retrace: Retrace | None) -> None:
        """The checkpoint; what it counts is on disk before it."""
        if self.rows is not None:
            self.rows.secure()
        state = {
            "walk": walk.state,
            "retrace": None if retrace is None else retrace.state,
            "threads": self.threads,
            "snapshots": self.taken,
            "seals": self.snapshots | {METRICS: self.metrics.mark},
        }
        save(self.folder, state, self.of)


@contextmanager
def diary(
    folder: RunFolder, setting: Setting, saved: State | None, of: str, threads: int, progress: AbstractProgress
) -> Iterator[Diary]:
    """The diary of a run, open where it was left."""
    columns, seals = Observer(setting).columns, dict(saved["seals"]) if saved else {}
    kept = seals.pop(METRICS)[0] if saved else None
    progress.start(folder.path.name, setting.experiment.steps, len(saved["walk"]["step_sizes"]) if saved else 0)
    with patience() as waiting, MetricsWriter(folder.path / METRICS, columns, kept) as metrics:
        taken = saved["snapshots"] if saved else 0
        yield Diary(folder, setting, metrics, of, threads, progress, waiting, seals, taken)
