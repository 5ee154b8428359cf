"""Training by secants where everything is large: processor seconds of a step, how they grow, and the largest memory.

Each size runs in a process of its own; a growth is the exponent of the number that differs from the base.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from math import log2, log10

import torch

from ntkexp.config.compose import compose
from ntkexp.run.loop import go
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.bench.backward import Deaf
from tests.bench.stopwatch import table

BASE = {"N": 500, "Q": 500, "w": 512, "C": 1, "T": 3}
LARGE = {"N": 2000, "Q": 2000, "w": 1024, "C": 1, "T": 3}
HEADER = ("N", "Q", "w", "C", "T", "kernels", "seconds a step", "growth", "GB")


def report(quick: bool = False) -> str:
    """The base, each of its numbers doubled; one and ten outputs, with and without kernels; and all large."""
    base = {"N": 8, "Q": 8, "w": 8, "C": 1, "T": 1} if quick else BASE
    first = row(base, "all")
    rows = [cells(base, "all", first, "")]
    for name in ("N",) if quick else ("N", "Q", "w", "T"):
        doubled = base | {name: 2 * base[name]}
        found = row(doubled, "all")
        rows.append(cells(doubled, "all", found, f"{log2(found[0] / first[0]):.2f} in {name}"))
    if not quick:
        one = base | {"N": 250, "Q": 250}
        found = row(one, "all")
        rows.append(cells(one, "all", found, ""))
        for kept in ("all", "none"):
            ten = row(one | {"C": 10}, kept)
            rows.append(cells(one | {"C": 10}, kept, ten, f"{log10(ten[0] / found[0]):.2f} in C"))
        rows.append(cells(LARGE, "all", row(LARGE, "all"), ""))
    return table("Scale: one thread", HEADER, rows)


def row(sizes: Mapping[str, int], kernels: str) -> tuple[float, float]:
    """Seconds and gigabytes of one size."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (dict(sizes), kernels))


def cells(sizes: Mapping[str, int], kernels: str, found: tuple[float, float], growth: str) -> list[str]:
    """A line of the table."""
    return [*map(str, sizes.values()), kernels, f"{found[0]:.3g}", growth, f"{found[1]:.2f}"]


def measured(sizes: Mapping[str, int], kernels: str) -> tuple[float, float]:
    """Processor seconds of the quickest step, once programs are made, and the largest memory of the process."""
    torch.set_num_threads(1)
    made = (f"model.width={sizes['w']}", f"data.train={sizes['N']}", f"data.probe={sizes['Q']}", "data.test=0")
    read = ("path.rule=[secant]", "path.error_samples=0", f"path.kernels={kernels}", "path.probes=[probe]")
    data = ("data=teacher", "data.dimension=64") if sizes["C"] == 1 else ("data=digits", "data.classes=all")
    setting = prepare(compose([*data, *made, *read, f"steps={sizes['T'] + 1}", "path.count=2"]))
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        listener = Timed(folder, ends)
        go(begin(setting, listener.trajectory), listener)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return min(after - before for before, after in pairwise(ends)), memory


class Timed(Deaf):
    """Takes the time after every step."""

    def __init__(self, folder: str, ends: list[float]) -> None:
        super().__init__(folder)
        self.ends = ends

    def on_step(self, state: object, loss: float) -> None:
        self.ends.append(time.process_time())
