"""A step size that stays what it is."""

from __future__ import annotations

from ntkexp.schedule.base import AbstractSchedule


class Constant(AbstractSchedule):
    """A schedule whose factor is 1.

    >>> [Constant(warm_up=3).factor(step, 10) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    def shape(self, step: int, steps: int) -> float:
        return 1.0
