"""The independent units of a fit: which runs are one draw.

A sweep repeats every place with the same seeds. Runs of one seed share what the seed drew, so a seed with its runs at
all places is one unit, whichever places it lacks, and a law is asked of each unit by itself: what its runs share, such
as a kernel that is large at every width, cancels. A seed at one place alone knows of no change. Only where fewer than
two seeds were run at several places are such single seeds put together, the k-th of each place, as if they were one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.report.analysis.estimate import CONFIDENCE, student

Unit: TypeAlias = NDArray[np.int64]
"""Which runs."""


def units(x: NDArray[np.float64], seeds: NDArray[np.int64]) -> list[Unit]:
    """Sort runs at these places with these seeds into units.

    >>> [unit.tolist() for unit in units(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), np.array([0, 0, 1, 1, 2]))]
    [[0, 1], [2, 3]]
    >>> [unit.tolist() for unit in units(np.array([1.0, 1.0, 2.0, 2.0]), np.array([0, 1, 2, 3]))]
    [[0, 2], [1, 3]]
    """
    of_seeds = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    shared = [unit for unit in of_seeds if np.ptp(x[unit]) > 0]
    return shared if len(shared) > 1 else shared + gathered([unit for unit in of_seeds if np.ptp(x[unit]) == 0], x)


def gathered(single: Sequence[Unit], x: NDArray[np.float64]) -> list[Unit]:
    """Put together seeds that were run at one place each, the k-th of every place."""
    places = [[unit for unit in single if x[unit[0]] == place] for place in np.unique(x)]
    rounds = ([unit for unit in turn if unit is not None] for turn in zip_longest(*places))
    return [np.concatenate(turn) for turn in rounds if len(turn) > 1]


def most_informative(known: Sequence[float]) -> list[int]:
    """Choose the units to ask, by how much each knows: those that make the expected interval shortest.

        t_{k−1} √(Σ 1/known)/k    of the k that know most

    Of three seeds at all widths, and one at two neighbouring widths, the last would only blur the mean.

    >>> most_informative([17.5, 10.0, 17.5]), most_informative([17.5, 17.5, 17.5, 0.5])
    ([0, 1, 2], [0, 1, 2])
    """
    best_first = sorted(range(len(known)), key=lambda unit: -known[unit])
    doubts = np.cumsum([1 / known[unit] for unit in best_first])
    reach = [student(k - 1, (1 + CONFIDENCE) / 2) * math.sqrt(doubts[k - 1]) / k for k in range(2, len(known) + 1)]
    return sorted(best_first[: 2 + int(np.argmin(reach))] if reach else best_first)
