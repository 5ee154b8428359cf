"""What would change if an example were left out, where a run has computed that."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.report.run import Run

Array: TypeAlias = NDArray[np.float64]

EFFECT = "effect"
NOT_COMPUTED = "not computed: path.effects=true"


def effects(run: Run) -> Array | None:
    """Read the predicted change of every output if an example were left out, [probe, out, example]."""
    if EFFECT not in run.contributions:
        return None
    return np.asarray(run.contributions[EFFECT].to_numpy(), dtype=float)


def influence(parts: Array) -> Array:
    """How much each example matters to all that is known of the points, [example], given [probe, out, example].

    >>> influence(np.array([[[3.0, 0.0], [4.0, np.nan]]]))
    array([5., 0.])
    """
    return np.asarray(np.sqrt(np.nansum(np.square(parts), axis=(0, 1))))
