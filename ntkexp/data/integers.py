"""Whole numbers from `first` to `last`, of which few are observed: a function on them can be seen as a whole.

    x = first … last,    y = value,    training sees the x of `observed`, in this order; all others are the test split

F. Huszár, "Some intuition on the neural tangent kernel" (2020), draws kernels over x = −10 … 20 with one observation,
(10, 50). Nothing is standardised and no order is drawn: numbers are to be recognised.

>>> data = Integers().split()
>>> data.train.inputs.tolist(), data.train.target.tolist(), len(data.test.inputs)
([[10.0]], [[50.0]], 30)
"""

from __future__ import annotations

from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.scale import Standardise
from ntkexp.mistake import Mistake

Whole = Annotated[int, Field(ge=-(10**6), le=10**6)]


class Integers(AbstractSource):
    """Regression towards one value; `train` is the number of those that are observed."""

    train: Count = 1
    probe: CountOrNone = 0
    standardise: Standardise = "none"
    first: Whole = -10
    last: Whole = 20
    observed: tuple[Whole, ...] = Field((10,), min_length=1)
    value: float = 50.0

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        """What is observed is there, once, and is what is trained on."""
        if outside := [x for x in self.observed if not self.first <= x <= self.last]:
            raise Mistake(
                f"data.observed={list(self.observed)}: {outside[0]} is not in {self.first} … {self.last}; "
                "change data.first or data.last"
            )
        if len(set(self.observed)) < len(self.observed):
            raise Mistake(f"data.observed={list(self.observed)}: give each number once")
        if self.train != len(self.observed):
            raise Mistake(
                f"data.train={self.train}: {len(self.observed)} of the numbers are observed; give the same number, or "
                "change data.observed"
            )
        if self.label_noise:
            raise Mistake("data.label_noise: the targets of integers are one value, so there is no share of a spread")
        return self

    def examples(self, generator: torch.Generator) -> Examples:
        others = [x for x in range(self.first, self.last + 1) if x not in set(self.observed)]
        inputs = torch.tensor([*self.observed, *others], dtype=torch.float64)[:, None]
        return Examples(inputs, torch.full_like(inputs, self.value), as_given=True)
