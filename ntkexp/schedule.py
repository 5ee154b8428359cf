"""Schedules of the step size: η_s = η · factor(s) at step s."""

from __future__ import annotations

from abc import abstractmethod
from math import cos, pi

from pydantic import Field, PositiveFloat

from ntkexp.component import MAX_STEPS, Component, Steps


class AbstractSchedule(Component):
    """A schedule of the step size, with a linear warm-up over `warm_up` steps."""

    warm_up: int = Field(0, ge=0, le=MAX_STEPS)

    @abstractmethod
    def shape(self, step: int, steps: int) -> float:
        """Return the factor at a step of a run of `steps` steps,
        without the warm-up."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor at a step of a run of `steps` steps,
        including the warm-up."""
        warm_up = min(1.0, (step + 1) / (self.warm_up + 1))
        return warm_up * self.shape(step, steps)


class Constant(AbstractSchedule):
    """A constant step size.

    >>> [Constant(warm_up=3).factor(step, 10) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    def shape(self, step: int, steps: int) -> float:
        return 1.0


class Cosine(AbstractSchedule):
    """A step size that falls along half a cosine (Loshchilov & Hutter 2017).

    In a run of S steps, factor(s) = last + (1 − last)(1 + cos(π s/S))/2. The factor
    falls from 1 at the first step towards `last`.

    >>> Cosine().factor(0, 100), Cosine(last=0.5).factor(50, 100)
    (1.0, 0.75)
    """

    last: float = Field(0.0, ge=0, le=1)

    def shape(self, step: int, steps: int) -> float:
        return self.last + (1 - self.last) * (1 + cos(pi * step / steps)) / 2


class Step(AbstractSchedule):
    """A step size that is multiplied by `decay` after every `every` steps.

    factor(s) = decay^⌊s/every⌋.

    >>> [Step(every=2, decay=0.5).factor(step, 6) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    every: Steps = 100
    decay: float = Field(0.5, gt=0, le=1)

    def shape(self, step: int, steps: int) -> float:
        return self.decay ** (step // self.every)


class List(AbstractSchedule):
    """A list of factors, one for each step. The last factor applies to all later steps.

    >>> [List(factors=(1, 0.1)).factor(step, 4) for step in range(4)]
    [1.0, 0.1, 0.1, 0.1]
    """

    factors: tuple[PositiveFloat, ...] = Field((1.0,), min_length=1)

    def shape(self, step: int, steps: int) -> float:
        return self.factors[min(step, len(self.factors) - 1)]
