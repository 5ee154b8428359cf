"""The sum backwards for optimizers with memory: the time of a step back and the peak of memory, against M.

Each size runs in a process of its own, since a peak is never forgotten.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.records.data import Trajectory
from ntkexp.run.loop import AbstractListener, reverse_pass, train_steps
from ntkexp.run.metrics import Row
from ntkexp.run.setting import prepare
from ntkexp.run.state import RunState, begin
from tests.bench.cell import Table, milliseconds

STEPS = 6


class Deaf(AbstractListener):
    """Keeps nothing but the trajectory, as it must."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_row(self, row: Row) -> None:
        pass

    def on_snapshot(
        self, step: int, kernel: Float[Tensor, "point out train out_"], output_gradient: Float[Tensor, "train out"]
    ) -> None:
        pass

    @property
    def scratch(self) -> Path:
        return self.folder

    def trajectory(self, rows: int, size: int) -> Trajectory:
        made = Trajectory(self.folder / "trajectory.bin", rows, size, "float64")
        made.take_room()
        return made

    def on_step(self, state: RunState, loss: float) -> None:
        pass

    def on_step_back(self, state: RunState, done: int, whole: int) -> None:
        pass

    def on_sweep(self, state: RunState, done: int, whole: int) -> None:
        pass

    def on_remark(self, text: str) -> None:
        pass

    def on_late_rows(self, rows: Sequence[Row]) -> None:
        pass

    def on_end(self) -> None:
        pass


def measured(width: int, train: int, threads: int) -> tuple[float, float, float, float]:
    """Seconds of a step, of a step back, gigabytes before it and at most."""
    torch.set_num_threads(threads)
    sizes = (f"model.width={width}", f"data.train={train}", "data.probe=64", "data.test=0", "data=teacher")
    rest = ("optimizer=adam", "path.probes=[probe]", "path.rule=[secant]", "path.count=2", f"steps={STEPS}")
    setting = prepare(compose([*sizes, *rest]))
    with tempfile.TemporaryDirectory() as folder:
        listener = Deaf(folder)
        state, start = begin(setting, listener.trajectory), time.perf_counter()
        train_steps(state, listener)
        before, turn = peak(), time.perf_counter()
        reverse_pass(state, listener)
        end = time.perf_counter()
    return (turn - start) / STEPS, (end - turn) / STEPS, before, peak()


def peak() -> float:
    """Gigabytes that this process used at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def report(*, quick: bool) -> list[Table]:
    """A row for every number of training examples."""
    width, counts = (16, (8, 16)) if quick else (512, (32, 128, 512, 2048))
    rows = []
    for train in counts:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            step, back, before, most = pool.apply(measured, (width, train, torch.get_num_threads()))
        rows.append([str(train), milliseconds(step), milliseconds(back), f"{before:.2f}", f"{most:.2f}"])
    header = ("M", "step, ms", "step back, ms", "GB before", "GB at most")
    return [Table(f"Adam, w = {width}, 64 attributed points, one rule", header, rows)]
