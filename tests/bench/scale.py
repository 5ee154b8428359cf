"""Training by secants where everything is large: processor seconds of a step, how they grow, and the largest memory.

Each size runs in a process of its own. Exponents are fitted to all sizes together, the large one among them.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ntkexp.config.compose import compose
from ntkexp.run.loop import go
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.bench.backward import Deaf
from tests.bench.stopwatch import table

SIZES = {
    "all": ({"N": 500, "Q": 500, "w": 512, "C": 1, "T": 3}, {"N": 2000, "Q": 2000, "w": 1024, "C": 1, "T": 3}),
    "none": ({"N": 2000, "Q": 250, "w": 512, "C": 5, "T": 3}, {"N": 10_000, "Q": 500, "w": 1024, "C": 10, "T": 3}),
}
"""By what is made of kernels: a base, and a run where everything is large."""
TIMES = {"N": (0.5, 2), "Q": (0.5, 2), "w": (0.5, 2), "C": (2, 4), "T": (2,)}
HEADER = ("N", "Q", "w", "C", "T", "kernels", "seconds a step", "growth", "GB")


def report(quick: bool = False) -> str:
    """Each number by itself around a base, and all large, with the exponents that fit; with kernels and without."""
    return table("Scale: one thread", HEADER, quick_rows() if quick else [row for kept in SIZES for row in lines(kept)])


def quick_rows() -> list[list[str]]:
    """Two sizes that take no time."""
    sizes = [{"N": n, "Q": 8, "w": 8, "C": 1, "T": 1} for n in (8, 16)]
    return [cells(size, "none", row(size, "none"), "") for size in sizes]


def lines(kept: str) -> list[list[str]]:
    """The lines of one way to make kernels; the last says how the time of a run grows, in all lines together."""
    base, large = SIZES[kept]
    varied = [base | {name: round(base[name] * by)} for name, times in TIMES.items() for by in times]
    sizes = [base, *varied, large]
    found = [row(size, kept) for size in sizes]
    grown = exponents(sizes, [seconds * size["T"] for size, (seconds, _) in zip(sizes, found, strict=True)])
    said = [*("" for _ in varied), "", " ".join(f"{name}^{power:.2f}" for name, power in grown.items())]
    return [cells(size, kept, one, growth) for size, one, growth in zip(sizes, found, said, strict=True)]


def exponents(sizes: Sequence[Mapping[str, int]], seconds: Sequence[float]) -> dict[str, float]:
    """The powers p of log(seconds) = log(c) + Σ p log(size), by least squares.

    >>> found = exponents([{"N": 1, "w": 1}, {"N": 2, "w": 1}, {"N": 1, "w": 2}], [3.0, 12.0, 6.0])
    >>> {name: round(power, 6) for name, power in found.items()}
    {'N': 2.0, 'w': 1.0}
    """
    rows = torch.tensor([[1.0, *(log(number) for number in size.values())] for size in sizes], dtype=torch.float64)
    aims = torch.tensor([[log(second)] for second in seconds], dtype=torch.float64)
    return dict(zip(sizes[0], torch.linalg.lstsq(rows, aims).solution[1:, 0].tolist(), strict=True))


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
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        data = classified(Path(folder), sizes) if sizes["C"] > 1 else ("data=teacher", "data.dimension=64")
        setting = prepare(compose([*data, *made, *read, f"steps={sizes['T'] + 1}", "path.count=2"]))
        listener = Timed(folder, ends)
        go(begin(setting, listener.trajectory, listener.scratch), listener)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return min(after - before for before, after in pairwise(ends)), memory


def classified(folder: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """So many classes of random points."""
    draw, count = np.random.default_rng(0), sizes["N"] + sizes["Q"]
    points = pd.DataFrame(draw.standard_normal((count, 64)).round(4), columns=[f"x{k}" for k in range(64)])
    points["label"] = [f"class {k % sizes['C']}" for k in range(count)]
    points.to_csv(folder / "points.csv", index=False)
    return ("data=table", f"data.path={folder / 'points.csv'}", "data.target=label")


class Timed(Deaf):
    """Takes the time after every step."""

    def __init__(self, folder: str, ends: list[float]) -> None:
        super().__init__(folder)
        self.ends = ends

    def on_step(self, state: object, loss: float) -> None:
        self.ends.append(time.process_time())
