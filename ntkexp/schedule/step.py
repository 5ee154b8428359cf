"""A step size that is multiplied by the same factor at regular intervals."""

from __future__ import annotations

from pydantic import Field

from ntkexp.component import Steps
from ntkexp.schedule.base import AbstractSchedule


class Step(AbstractSchedule):
    """factor = decay^⌊s/every⌋.

    >>> [Step(every=2, decay=0.5).factor(step, 6) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    every: Steps = 100
    decay: float = Field(0.5, gt=0, le=1)

    def shape(self, step: int, steps: int) -> float:
        return self.decay ** (step // self.every)
