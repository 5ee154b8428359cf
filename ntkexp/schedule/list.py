"""A step size that is written out, step by step."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from ntkexp.schedule.base import AbstractSchedule


class List(AbstractSchedule):
    """factor = the step's entry in a list; the last entry stays.

    >>> [List(factors=(1, 0.1)).factor(step, 4) for step in range(4)]
    [1.0, 0.1, 0.1, 0.1]
    """

    factors: tuple[PositiveFloat, ...] = Field((1.0,), min_length=1)

    def shape(self, step: int, steps: int) -> float:
        return self.factors[min(step, len(self.factors) - 1)]
