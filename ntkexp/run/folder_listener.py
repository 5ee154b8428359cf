"""A listener that keeps what it hears in the run folder as it happens, with checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from ntkexp.progress import AbstractProgress
from ntkexp.records.folder import RunFolder
from ntkexp.records.json_file import Json
from ntkexp.records.kernels import KERNELS, snapshot_places, write_snapshot
from ntkexp.records.metrics import RETRACED, MetricsWriter
from ntkexp.records.seal import sealed
from ntkexp.records.trajectory import Trajectory
from ntkexp.run.checkpoint import METRICS, TRAJECTORY, Checkpoint, save
from ntkexp.run.clock import Clock
from ntkexp.run.interrupt import Interrupt, deferred_interrupt
from ntkexp.run.listener import AbstractListener
from ntkexp.run.metrics import SHARE_COLUMNS, Observer
from ntkexp.run.row import Row
from ntkexp.run.save import array
from ntkexp.run.setting import Setting
from ntkexp.run.state import RunState

PATIENCE = 20
"""How often as long as it took to save sums on disk nothing is saved: so checkpoints take a twentieth of the time."""


@dataclass(kw_only=True)
class FolderListener(AbstractListener):
    """Keeps rows, kernels and checkpoints in a run folder."""

    folder: RunFolder
    setting: Setting
    metrics: MetricsWriter
    of: str  # the run's identity
    threads: int
    progress: AbstractProgress
    clock: Clock
    interrupt: Interrupt
    snapshots: dict[str, tuple[int, str]] = field(default_factory=dict)  # the seals of their files
    taken: int = 0  # how many snapshots
    rows: Trajectory | None = None
    way: str = ""  # on which the run is, when it has gone forwards
    drift: float | None = None
    saved_at: float = field(default_factory=time.monotonic)
    took: float = 0.0  # to save
    shown_at: float = 0.0

    def on_row(self, row: Row) -> None:
        self.metrics.write(row)
        self.drift = row.get("drift") or self.drift

    def on_snapshot(
        self, step: int, kernel: Float[Tensor, "point kept train kept_"], output_gradient: Float[Tensor, "train out_"]
    ) -> None:
        read, gradient = array(kernel[self.setting.domain.read]), array(output_gradient)
        write_snapshot(self.folder.path / KERNELS, self.taken, step, read, gradient)
        self.snapshots |= sealed(self.folder.path, snapshot_places(self.folder.path, self.taken))
        self.taken += 1

    def on_step(self, state: RunState, loss: float) -> None:
        self.progress.step(state.step, loss, self.drift)
        self.show({"step": state.step, "steps": self.setting.experiment.steps, "loss": loss})
        self.checkpoint(state)

    def on_step_back(self, state: RunState, done: int, whole: int) -> None:
        self.go_on("back", state, done, whole)

    def on_sweep(self, state: RunState, done: int, whole: int) -> None:
        self.go_on("effects", state, done, whole)

    def go_on(self, way: str, state: RunState, done: int, whole: int) -> None:
        """Show how far a way over the steps that were taken has led."""
        if self.way != way:
            self.way = way
            self.progress.start(f"{self.folder.path.name}, {way}", whole, done - 1)
        self.progress.step(done, None, None)
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
        self.rows.take_room()
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
        if self.interrupt.asked or time.monotonic() - self.saved_at >= self.interval:
            begun = time.monotonic()
            self.save(state)
            self.saved_at = time.monotonic()
            self.took = self.saved_at - begun
        if self.interrupt.asked:
            raise KeyboardInterrupt

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next."""
        wanted = self.setting.experiment.checkpoint_seconds
        return max(wanted, PATIENCE * self.took) if self.setting.domain.spills else wanted

    def save(self, state: RunState) -> None:
        """The checkpoint; what it counts is on disk before it."""
        if self.rows is not None:
            self.rows.secure()
        kept = {
            "run": state.state,
            "threads": self.threads,
            "took": astuple(self.clock.whole),
            "snapshots": self.taken,
            "seals": self.snapshots | {METRICS: self.metrics.mark},
        }
        save(self.folder, kept, state.step, self.of)


@contextmanager
def listen(
    folder: RunFolder,
    setting: Setting,
    saved: Checkpoint | None,
    of: str,
    threads: int,
    progress: AbstractProgress,
    clock: Clock,
) -> Iterator[FolderListener]:
    """The listener of a run, which goes on where it was left."""
    columns, seals = Observer(setting).columns, dict(saved["seals"]) if saved else {}
    kept = seals.pop(METRICS)[0] if saved else None
    progress.start(folder.path.name, setting.experiment.steps, len(saved["run"]["step_sizes"]) if saved else 0)
    with deferred_interrupt() as interrupt, MetricsWriter(folder.path / METRICS, columns, kept) as metrics:
        yield FolderListener(
            folder=folder,
            setting=setting,
            metrics=metrics,
            of=of,
            threads=threads,
            progress=progress,
            clock=clock,
            interrupt=interrupt,
            snapshots=seals,
            taken=saved["snapshots"] if saved else 0,
        )
