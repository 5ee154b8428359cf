"""A step size that falls along half a cosine (Loshchilov & Hutter 2017)."""

from __future__ import annotations

from math import cos, pi

from pydantic import Field

from ntkexp.schedule.base import AbstractSchedule


class Cosine(AbstractSchedule):
    """factor = last + (1 − last)(1 + cos(π s/S))/2, from 1 at the first step towards `last` after S steps.

    >>> Cosine().factor(0, 100), Cosine(last=0.5).factor(50, 100)
    (1.0, 0.75)
    """

    last: float = Field(0.0, ge=0, le=1)

    def shape(self, step: int, steps: int) -> float:
        return self.last + (1 - self.last) * (1 + cos(pi * step / steps)) / 2
