"""Training by secants with large sizes: processor seconds of a step, their growth, and the largest memory.

Each size runs in its own process, with the default `memory_gb`. Exponents are fitted to all sizes together.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, expm1, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from ntkexp.config.compose import compose
from ntkexp.on_disk import is_on_disk
from ntkexp.run.loop import SilentListener, train_steps
from ntkexp.run.metrics import Row
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.bench.cell import Table

TITLE = "Scale: one thread"
SIZES = {
    "all": ({"N": 500, "Q": 500, "w": 512, "C": 1, "T": 3}, {"N": 2000, "Q": 2000, "w": 1024, "C": 1, "T": 3}),
    "none": ({"N": 2000, "Q": 250, "w": 512, "C": 5, "T": 3}, {"N": 10_000, "Q": 500, "w": 1024, "C": 10, "T": 3}),
}
"""For each value of `path.kernels`: the base size, and a size where everything is large."""
TIMES = {"N": (0.5, 2), "Q": (0.5, 2), "w": (0.5, 2), "C": (2, 4), "T": (2,)}
HEADER = ("N", "Q", "w", "C", "T", "kernels", "seconds a step", "by the clock", "closure", "growth", "GB", "on disk")


class Cost(NamedTuple):
    """The cost of a run: processor and wall seconds of its quickest step, gigabytes of memory and of sums on disk, and
    the largest closure of a step."""

    processor: float
    clock: float
    memory: float
    disk: float
    closure: float


def report(*, quick: bool) -> list[Table]:
    """Return rows that vary one size at a time, and all together, with fitted exponents."""
    if quick:
        size = {"N": 8, "Q": 8, "w": 8, "C": 1, "T": 1}
        return [Table(TITLE, HEADER, [cells(size, "none", row(size, "none"), "")])]
    return [Table(TITLE, HEADER, [row for kernels in SIZES for row in lines(kernels)])]


def lines(kernels: str) -> list[list[str]]:
    """Return the rows of one value of `path.kernels`. The last row has the fit of all rows."""
    base, large = SIZES[kernels]
    varied = [base | {name: round(base[name] * by)} for name, times in TIMES.items() for by in times]
    sizes = [base, *varied, large]
    found = [row(size, kernels) for size in sizes]
    grown = growth(sizes, [cost.processor * size["T"] for size, cost in zip(sizes, found, strict=True)])
    said = [*("" for _ in varied), "", in_words(grown)]
    return [cells(size, kernels, one, words) for size, one, words in zip(sizes, found, said, strict=True)]


class Growth(NamedTuple):
    """A fit seconds = c · Π size^power, with the root mean square residual of log(seconds)."""

    factor: float
    powers: dict[str, float]
    residual: float


def growth(sizes: Sequence[Mapping[str, int]], seconds: Sequence[float]) -> Growth:
    """Fit log(seconds) = log(c) + Σ p log(size) by least squares.

    >>> found = growth([{"N": 1, "w": 1}, {"N": 2, "w": 1}, {"N": 1, "w": 2}], [3.0, 12.0, 6.0])
    >>> in_words(found)
    '3 · N^2.00 w^1.00, off by 0 %'
    >>> in_words(growth([{"N": 1}, {"N": 1}], [0.9, 1 / 0.9]))
    '1 · N^0.00, off by 11 %'
    """
    rows = torch.tensor([[1.0, *(log(number) for number in size.values())] for size in sizes], dtype=torch.float64)
    aims = torch.tensor([[log(second)] for second in seconds], dtype=torch.float64)
    found = torch.linalg.lstsq(rows, aims, driver="gelsd").solution
    residual = float((rows @ found - aims).square().mean().sqrt())
    return Growth(exp(float(found[0])), dict(zip(sizes[0], found[1:, 0].tolist(), strict=True)), residual)


def in_words(grown: Growth) -> str:
    """Spell the fit as a formula, with its typical relative error."""
    powers = " ".join(f"{name}^{power:.2f}" for name, power in grown.powers.items())
    return f"{grown.factor:.3g} · {powers}, off by {expm1(grown.residual):.0%}".replace("%", " %")


def row(sizes: Mapping[str, int], kernels: str) -> Cost:
    """Measure one size, and print its row at once on stderr."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measured, (dict(sizes), kernels))
    sys.stderr.write("  ".join(cells(sizes, kernels, found, "")) + "\n")
    return found


def cells(sizes: Mapping[str, int], kernels: str, found: Cost, growth: str) -> list[str]:
    """Return a row of the table."""
    times = f"{found.processor:.3g}", f"{found.clock:.3g}", f"{found.closure:.0e}"
    return [*map(str, sizes.values()), kernels, *times, growth, f"{found.memory:.2f}", f"{found.disk:.1f}"]


def measured(sizes: Mapping[str, int], kernels: str) -> Cost:
    """Measure a run. Its first step compiles the programs of the others."""
    torch.set_num_threads(1)
    made = (f"model.width={sizes['w']}", f"data.train={sizes['N']}", f"data.query={sizes['Q']}", "data.test=0")
    read = ("path.rule=[secant]", "path.error_samples=0", f"path.kernels={kernels}", "path.queries=[query]")
    with tempfile.TemporaryDirectory() as folder:
        data = classified(Path(folder), sizes) if sizes["C"] > 1 else ("data=teacher", "data.dimension=64")
        setting = prepare(compose([*data, *made, *read, f"steps={sizes['T'] + 1}", "path.count=2"]))
        listener = Timed(Path(folder))
        state = begin(setting, listener.trajectory, listener.scratch)
        train_steps(state, listener)
        sums = [found.contributions for found in state.accumulator.integrals.values()]
        disk = sum(each.nbytes for each in sums if is_on_disk(each)) / 1e9
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    processor, clock = (min(b - a for a, b in pairwise(times)) for times in zip(*listener.ends, strict=True))
    return Cost(processor, clock, memory, disk, max(listener.closures))


def classified(folder: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Write a table of random points with classes, and return the words that read it."""
    draw, count = np.random.default_rng(0), sizes["N"] + sizes["Q"]
    points = pd.DataFrame(draw.standard_normal((count, 64)).round(4), columns=[f"x{k}" for k in range(64)])
    points["label"] = [f"class {k % sizes['C']}" for k in range(count)]
    points.to_csv(folder / "points.csv", index=False)
    return ("data=table", f"data.path={folder / 'points.csv'}", "data.target=label")


@dataclass(frozen=True)
class Timed(SilentListener):
    """A listener that records the time and the closure after each step."""

    ends: list[tuple[float, float]] = field(default_factory=list)
    closures: list[float] = field(default_factory=list)

    def on_row(self, row: Row) -> None:
        self.closures.append(float(row["closure"] or 0.0))

    def on_step(self, state: object, loss: float) -> None:
        self.ends.append((time.process_time(), time.perf_counter()))
