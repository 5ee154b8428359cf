"""The variance of the first kernel over seeds: how much of K_0 is chance.

    v_s = n/(n − 1) ‖K_s − K̄‖²/‖K̄‖²,    K̄ the mean of the n kernels at a point, among the training examples

A number of each seed, how far it is from what the others say; their mean is the unbiased variance, relative to ‖K̄‖².
So it has a law like every other number, seed by seed. But all v_s have K̄ in common: with kernels of many entries two
of them correlate by 1/(n − 1)², which makes intervals too short by √((n − 1)/(n − 2)), and with two seeds they are one
number. Kernels have entries in common only where the seeds learn the same data.

>>> spread([1.0, 2.0, 3.0], np.atleast_1d)  # variance 1, mean 2
[0.375, 0.0, 0.375]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.data import read_data
from ntkexp.records.sweep import Sweep
from ntkexp.report.quantity import START_VARIANCE
from ntkexp.report.run import Run

NEEDS = ", which takes two seeds or more at a point, all on the same data, such as with data.seed=0"

KERNELS = "kernels.zarr"

T = TypeVar("T")


def start_variances(sweep: Sweep, runs: Mapping[Path, Run]) -> dict[Path, dict[str, float]]:
    """Find the number of every run that has one, by its name."""
    found: dict[Path, float] = {}
    for point in dict.fromkeys(place.point for place in sweep.runs):
        here = [runs[place.folder] for place in sweep.runs if place.point == point and place.folder in runs]
        found |= of_point([run for run in here if not run.diverged and kept_start(run)])
    return {folder: {START_VARIANCE: value} for folder, value in found.items()}


def of_point(runs: Sequence[Run]) -> dict[Path, float]:
    """Find the numbers of the seeds at one point; none where there is nothing to compare."""
    if len(runs) < 2 or len({digest(run) for run in runs}) > 1:
        return {}
    return dict(zip([run.path for run in runs], spread(runs, first_kernel), strict=True))


def spread(seeds: Sequence[T], kernel: Callable[[T], NDArray[np.float64]]) -> list[float]:
    """Find v_s of every seed. Kernels are large, so each is read twice and none is kept."""
    n = len(seeds)
    mean = reduce(np.add, map(kernel, seeds)) / n
    size = float((mean**2).sum()) * (n - 1) / n
    return [float(((kernel(seed) - mean) ** 2).sum()) / size if size else math.nan for seed in seeds]


def dependence(seeds: int) -> float:
    """Find the factor by which intervals have to be longer, because n seeds have K̄ in common; two of them have no
    interval.
    """
    return math.sqrt((seeds - 1) / (seeds - 2)) if seeds > 2 else math.inf


def kept_start(run: Run) -> bool:
    """Whether the first kernel is there, as it was written, and so are the data."""
    from ntkexp.records.kernels import read_steps  # noqa: PLC0415  slow, and few sweeps ask for kernels

    try:
        return bool(run.sealed("data.npz")) and 0 in read_steps(run.sealed(KERNELS))
    except Mistake:
        return False


def first_kernel(run: Run) -> NDArray[np.float64]:
    """Read K_0 among the training examples, or at all points that were read if those were not."""
    from ntkexp.records.kernels import read_snapshot, read_steps  # noqa: PLC0415  the same

    steps = read_steps(run.path / KERNELS).tolist()
    kernel = read_snapshot(run.path / KERNELS, steps.index(0))
    return kernel[: kernel.shape[2]] if "train" in run.read else kernel


def digest(run: Run) -> str:
    """Digest what tells apart the data that runs learned."""
    return sha256(read_data(run.path / "data.npz")["train_inputs"].tobytes()).hexdigest()
