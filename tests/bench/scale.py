"""Training by secants where everything is large: processor seconds of a step, how they grow, and the largest memory.

Each size runs in a process of its own; a growth is the exponent of the number that differs from the base.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from statistics import linear_regression

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
    """Each number by itself at half, once and twice the base, and one to ten outputs, with the exponents that fit; the
    same without kernels; and all large.
    """
    base, half = ({"N": 8, "Q": 8, "w": 8, "C": 1, "T": 1}, 1) if quick else (BASE, 2)
    rows = []
    for name in ("N",) if quick else ("N", "Q", "w", "T"):
        rows += varied(base, name, [base[name] // half, base[name], 2 * base[name]], "all")
    if not quick:
        for kept in ("all", "none"):
            rows += varied(base | {"N": 250, "Q": 250}, "C", [3, 5, 10], kept)
        rows.append(cells(LARGE, "all", row(LARGE, "all"), ""))
    return table("Scale: one thread", HEADER, rows)


def varied(base: Mapping[str, int], name: str, values: Sequence[int], kernels: str) -> list[list[str]]:
    """Lines of one number at these values; the last says how the time of a step grows."""
    sizes = [dict(base) | {name: value} for value in dict.fromkeys(values)]
    found = [row(size, kernels) for size in sizes]
    growth = exponent([size[name] for size in sizes], [seconds for seconds, _ in found])
    lines = [cells(size, kernels, one, "") for size, one in zip(sizes[:-1], found[:-1], strict=True)]
    return [*lines, cells(sizes[-1], kernels, found[-1], f"{name}^{growth:.2f}")]


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log(seconds) over log(size), by least squares.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return linear_regression([log(size) for size in sizes], [log(second) for second in seconds]).slope


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
    data = (
        ("data=teacher", "data.dimension=64")
        if sizes["C"] == 1
        else ("data=digits", f"data.classes={[*range(sizes['C'])]}")
    )
    setting = prepare(compose([*data, *made, *read, f"steps={sizes['T'] + 1}", "path.count=2"]))
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        listener = Timed(folder, ends)
        go(begin(setting, listener.trajectory, listener.scratch), listener)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return min(after - before for before, after in pairwise(ends)), memory


class Timed(Deaf):
    """Takes the time after every step."""

    def __init__(self, folder: str, ends: list[float]) -> None:
        super().__init__(folder)
        self.ends = ends

    def on_step(self, state: object, loss: float) -> None:
        self.ends.append(time.process_time())
