"""When training moved an output: what came of each step, or of each stretch of steps, and by when most of it was there.

    d(s) = f_s − f_0,      most by the first s with |d(t) − d(T)| ≤ ½ |d(T)| for all t ≥ s

What an optimizer remembers of a gradient counts where the gradient was taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import BY_STEP, LAST_STEP
from ntkexp.report.run import Run
from ntkexp.text import percent


@dataclass(frozen=True, eq=False)
class Movement:
    """An output at a point moved by so much in each stretch of steps, up to its last step."""

    by_step: NDArray[np.float64]
    last_step: NDArray[np.int64]

    @property
    def steps(self) -> int:
        """Training took so many."""
        return int(self.last_step[-1]) + 1

    @property
    def most_by(self) -> int | None:
        """The number of steps after which most of the change was there, and stayed; None where nothing has changed.

        >>> Movement(np.array([1.0, -3.0, 4.0, 0.5]), np.arange(4)).most_by
        3
        """
        so_far = np.cumsum(self.by_step)
        if not so_far[-1]:
            return None
        away = np.flatnonzero(np.abs(so_far - so_far[-1]) > abs(so_far[-1]) / 2)
        return int(self.last_step[away[-1] + 1 if len(away) else 0]) + 1

    @property
    def sentence(self) -> str:
        """Say when most of the change came.

        >>> Movement(np.array([3.0, 1.0, 0.5, 0.5]), np.arange(4)).sentence
        'most of what training changed here came in the first 25 % of its steps (1 of 4)'
        """
        if (most := self.most_by) is None:
            return ""
        return (
            f"most of what training changed here came in the first {percent(most / self.steps)} of its steps "
            f"({most} of {self.steps})"
        )


def movement(run: Run, rule: str, point: int, out: int) -> Movement | None:
    """Find how an output moved, if that is known."""
    found = run.by_rule(BY_STEP, rule)
    if found is None or not found.sizes["step"]:
        return None
    by_step = found.isel(probe=point).sel(out=out).to_numpy().astype(float)
    return Movement(by_step, run.contributions[LAST_STEP].to_numpy()) if np.isfinite(by_step).all() else None
