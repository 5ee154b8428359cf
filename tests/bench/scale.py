"""Training by secants where everything is large: processor seconds of a step, how they grow, and the largest memory.

Each size runs in a process of its own, within the `memory_gb` of a default run. Exponents are fitted to all sizes
together, the large one among them. With `--large` it is a grid of as many points as examples, whose contributions lie
on disk in the end: some 20 minutes, and 17 GB of disk.
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
"""By what is made of kernels: a base, and a run where everything is large."""
TIMES = {"N": (0.5, 2), "Q": (0.5, 2), "w": (0.5, 2), "C": (2, 4), "T": (2,)}
GRID = tuple({"N": n, "Q": n, "w": 1024, "C": c, "T": 1} for n in (2000, 5000, 10_000) for c in (1, 10))
HEADER = ("N", "Q", "w", "C", "T", "kernels", "seconds a step", "by the clock", "closure", "growth", "GB", "on disk")


class Cost(NamedTuple):
    """What a run took: processor seconds and seconds of its quickest step, its largest memory, its sums on disk, and by
    how much the sums of a step missed its change at most."""

    processor: float
    clock: float
    memory: float
    disk: float
    closure: float


def report(quick: bool = False, large: bool = False) -> list[Table]:
    """Each number by itself around a base, and all large, with the exponents that fit; with kernels and without."""
    if quick:
        return [Table(TITLE, HEADER, quick_rows())]
    return [Table(TITLE, HEADER, grid() if large else [row for kept in SIZES for row in lines(kept)])]


def quick_rows() -> list[list[str]]:
    """A size that takes no time."""
    size = {"N": 8, "Q": 8, "w": 8, "C": 1, "T": 1}
    return [cells(size, "none", row(size, "none"), "")]


def grid() -> list[list[str]]:
    """As many points as examples, and up to ten outputs; the last line says how the time of a step grows."""
    found = [row(size, "none") for size in GRID]
    grown = growth([{"N = Q": size["N"], "C": size["C"]} for size in GRID], [cost.processor for cost in found])
    said = [*[""] * (len(GRID) - 1), in_words(grown)]
    return [cells(size, "none", one, words) for size, one, words in zip(GRID, found, said, strict=True)]


def lines(kept: str) -> list[list[str]]:
    """The lines of one way to make kernels; the last says how the time of a run grows, in all lines together."""
    base, large = SIZES[kept]
    varied = [base | {name: round(base[name] * by)} for name, times in TIMES.items() for by in times]
    sizes = [base, *varied, large]
    found = [row(size, kept) for size in sizes]
    grown = growth(sizes, [cost.processor * size["T"] for size, cost in zip(sizes, found, strict=True)])
    said = [*("" for _ in varied), "", in_words(grown)]
    return [cells(size, kept, one, words) for size, one, words in zip(sizes, found, said, strict=True)]


class Growth(NamedTuple):
    """How seconds grow, c · Π size^power, and how far they are from that: log(seconds), the root of its mean square."""

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
    """The fit as a formula, with the factor by which it is off."""
    powers = " ".join(f"{name}^{power:.2f}" for name, power in grown.powers.items())
    return f"{grown.factor:.3g} · {powers}, off by {expm1(grown.residual):.0%}".replace("%", " %")


def row(sizes: Mapping[str, int], kernels: str) -> Cost:
    """Measure one size; it is said at once, since a table takes long."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measured, (dict(sizes), kernels))
    sys.stderr.write("  ".join(cells(sizes, kernels, found, "")) + "\n")
    return found


def cells(sizes: Mapping[str, int], kernels: str, found: Cost, growth: str) -> list[str]:
    """A line of the table."""
    times = f"{found.processor:.3g}", f"{found.clock:.3g}", f"{found.closure:.0e}"
    return [*map(str, sizes.values()), kernels, *times, growth, f"{found.memory:.2f}", f"{found.disk:.1f}"]


def measured(sizes: Mapping[str, int], kernels: str) -> Cost:
    """A run whose first step makes the programs of the others."""
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
    """So many classes of random points."""
    draw, count = np.random.default_rng(0), sizes["N"] + sizes["Q"]
    points = pd.DataFrame(draw.standard_normal((count, 64)).round(4), columns=[f"x{k}" for k in range(64)])
    points["label"] = [f"class {k % sizes['C']}" for k in range(count)]
    points.to_csv(folder / "points.csv", index=False)
    return ("data=table", f"data.path={folder / 'points.csv'}", "data.target=label")


@dataclass(frozen=True)
class Timed(SilentListener):
    """Takes the time after every step, and notes whether it closes."""

    ends: list[tuple[float, float]] = field(default_factory=list)
    closures: list[float] = field(default_factory=list)

    def on_row(self, row: Row) -> None:
        self.closures.append(float(row["closure"] or 0.0))

    def on_step(self, state: object, loss: float) -> None:
        self.ends.append((time.process_time(), time.perf_counter()))
