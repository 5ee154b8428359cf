"""The variance of the first kernel over seeds: how much of K_0 is chance.

    u_k = (k − 1)/k ‖K_k − (K_1 + … + K_{k−1})/(k − 1)‖²/‖K̄‖²,  k = 2 … n,    K̄ the mean of the n kernels at a point

A number of each seed but the first: how far its kernel is from the mean of those before it, among the training
examples. The mean of these numbers is the unbiased variance, relative to ‖K̄‖² (Helmert's transformation), and each seed
has a law of its own. Where all seeds fluctuate alike the differences are independent; distances from K̄ are not. Where
they do not, a seed that is far off would be in every mean after its own. So seeds are taken from the nearest to the
farthest, in one order for the whole sweep, and `dependence` makes up for what two differences still have in common. Two
seeds are one difference. Kernels have entries in common only where the seeds learn the same data.

>>> spread([1.0, 2.0, 3.0], np.atleast_1d)  # variance 1, mean 2
[0.125, 0.375]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.data import read_data
from ntkexp.records.sweep import Level, Sweep
from ntkexp.report.quantity import START_VARIANCE
from ntkexp.report.run import Run

NEEDS = ", which takes two seeds or more at a point, all on the same data, such as with data.seed=0"

KERNELS = "kernels.zarr"

T = TypeVar("T")


def start_variances(sweep: Sweep, runs: Mapping[Path, Run]) -> dict[Path, dict[str, float]]:
    """Find the number of every run that has one, by its name."""
    points = dict.fromkeys(place.point for place in sweep.runs)
    every = [comparable(sweep, runs, point) for point in points]
    order = nearest_first(
        [dict(zip(here, distances(list(here.values()), first_kernel), strict=True)) for here in every]
    )
    found: dict[Path, float] = {}
    for here in every:
        seeds = [here[seed] for seed in order if seed in here]
        found |= zip([run.path for run in seeds[1:]], spread(seeds, first_kernel), strict=True)
    return {folder: {START_VARIANCE: value} for folder, value in found.items()}


def comparable(sweep: Sweep, runs: Mapping[Path, Run], point: tuple[Level, ...]) -> dict[int, Run]:
    """Find the runs at one point whose first kernels can be compared, by their seeds; none where it is one alone."""
    here = {place.seed: runs[place.folder] for place in sweep.runs if place.point == point and place.folder in runs}
    found = {seed: run for seed, run in here.items() if not run.diverged and kept_start(run)}
    return found if len(found) > 1 and len(set(map(digest, found.values()))) == 1 else {}


def distances(seeds: Sequence[T], kernel: Callable[[T], NDArray[np.float64]]) -> list[float]:
    """Find ‖K_s − K̄‖² of every seed. Kernels are large, so each is read again and none is kept."""
    mean = reduce(np.add, map(kernel, seeds)) / len(seeds) if seeds else 0.0
    return [float(((kernel(seed) - mean) ** 2).sum()) for seed in seeds]


def nearest_first(points: Iterable[Mapping[int, float]]) -> list[int]:
    """Order seeds by their shares of what fluctuates, as means over the points at which they are.

    >>> nearest_first([{0: 3.0, 1: 1.0}, {0: 20.0, 1: 10.0, 2: 970.0}])
    [1, 0, 2]
    """
    shares: dict[int, list[float]] = {}
    for point in points:
        whole = sum(point.values()) or 1.0
        for seed, distance in point.items():
            shares.setdefault(seed, []).append(distance / whole)
    return sorted(shares, key=lambda seed: (float(np.mean(shares[seed])), seed))


def spread(seeds: Sequence[T], kernel: Callable[[T], NDArray[np.float64]]) -> list[float]:
    """Find u_k of every seed but the first, in this order."""
    if not seeds:
        return []
    total, parts = kernel(seeds[0]), list[float]()
    for k, seed in enumerate(seeds[1:], start=2):
        this = kernel(seed)
        parts.append((k - 1) / k * float(((this - total / (k - 1)) ** 2).sum()))
        total = total + this
    size = float(((total / len(seeds)) ** 2).sum())
    return [part / size if size else math.nan for part in parts]


def dependence(seeds: int) -> float:
    """Find the factor by which intervals have to be longer, because n − 1 differences may have something in common.

    They have most where the first seed hardly fluctuates and all others alike. D_k = X_k − (X_2 + … + X_{k−1})/(k − 1),
    so that for k < l

        Cov(D_k, D_l) = −1/((k − 1)(l − 1)),    Var D_k = 1 + (k − 2)/(k − 1)²

    and their squares, and what is found from these, correlate by ρ² at most. A mean of m numbers with correlations of
    r̄ on average varies (1 + (m − 1) r̄)/(1 − r̄) times as much as its spread says.

    >>> round(dependence(3) ** 2, 12), dependence(2)  # ρ² = 1/5
    (1.5, 1.0)
    """
    variance = {k: 1 + (k - 2) / (k - 1) ** 2 for k in range(2, seeds + 1)}
    shared = [((k - 1) * (m - 1)) ** -2 / (variance[k] * variance[m]) for k, m in combinations(variance, 2)]
    mean = sum(shared) / len(shared) if shared else 0.0
    return math.sqrt((1 + (seeds - 2) * mean) / (1 - mean))


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
