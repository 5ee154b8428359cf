"""A power law that a sweep looks for, and what theory says of its exponent.

An exponent is met to within a margin, or bounded: from above, or from below (`ntkexp.report.analysis.verdict`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import Field

from ntkexp.component import Component

Bound: TypeAlias = Literal["upper", "lower"]

MARGIN = 0.1
"""How far an exponent may be from theory's, if nothing else is said: exponents in dispute are half a unit apart."""


@dataclass(frozen=True)
class Expected:
    """What theory says of a number, and how closely it is to be met.

    >>> Expected(-0.5, bound="upper").low, Expected(-0.5, margin=0.25).high
    (-inf, -0.25)
    """

    value: float
    margin: float = MARGIN
    bound: Bound | None = None

    @property
    def low(self) -> float:
        """Where the range begins."""
        return -math.inf if self.bound == "upper" else self.value - self.margin

    @property
    def high(self) -> float:
        """Where the range ends."""
        return math.inf if self.bound == "lower" else self.value + self.margin


class Fit(Component):
    """A number of each run (`drift`, `left.test`, …) as a power of an axis, and theory's exponent, where there is one.

    >>> Fit(quantity="drift", axis="model.width", exponent=-0.5).expected
    Expected(value=-0.5, margin=0.1, bound=None)
    """

    quantity: str
    axis: str
    exponent: float | None = None
    margin: float = Field(MARGIN, gt=0)
    bound: Bound | None = None

    @property
    def expected(self) -> Expected | None:
        """What the exponent is compared with."""
        return None if self.exponent is None else Expected(self.exponent, self.margin, self.bound)
