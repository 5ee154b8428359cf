"""How well the parts are known that a pass backwards finds: the same pass with twice the pieces, at a sample of points.

    e(x, ·) = (𝒮_2n(x, ·) − 𝒮_n(x, ·)) · 4/3,        ‖𝒮 − 𝒮_integral‖² ≈ Q/m Σ_{m of Q points} ‖e(x, ·)‖²

What a step's Jacobian is off by enters the bracket, and through it the parts of every step before: a sample of steps
would need a bracket for each. A point has a bracket of its own, so points are sampled, and each is measured over the
whole path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.accumulate.tally import Tally
from ntkexp.path.backward.backward_sum import BackwardSum, StepBack
from ntkexp.path.points import Points, StepBlock


@dataclass(kw_only=True)
class Doubled:
    """The integrals with twice the pieces at the points of a sample, which are some of those attributed."""

    rule: str  # whose error is measured
    integrals: Integrals
    sample: Int[Tensor, " sample"]
    gain: float
    points: Points | None = None  # those of the chunk at work, if the sample has any there
    backward: BackwardSum | None = None

    def begin(self, chunk: slice, points: Points, saved: list[Tensor]) -> None:
        """An empty bracket (or that of a checkpoint) for the points of the sample in a chunk."""
        (here,) = torch.where((self.sample >= chunk.start) & (self.sample < chunk.stop))
        self.points = self.backward = None
        if len(here):
            inputs = points.inputs[self.sample[here] - chunk.start]
            self.points = replace(points, inputs=inputs, block=len(inputs), shelves=[])
            self.backward = BackwardSum(integrals=self.integrals, place=here, saved=saved)

    def add(self, back: StepBack) -> None:
        """Take one step back, if any point of the sample is at work."""
        if self.points is not None and self.backward is not None:
            block = StepBlock(self.points, back.step.segment, slice(0, len(self.points.inputs)))
            self.backward.add(back, block, Tally())

    def error(self, contributions: Float[Tensor, "attributed out train"]) -> float:
        """‖𝒮 − 𝒮_integral‖ over all points that are attributed."""
        difference = self.integrals.contributions - contributions[self.sample]
        return self.gain * float(difference.norm()) * sqrt(len(contributions) / len(self.sample))

    @property
    def state(self) -> dict[str, Any]:
        """The accumulators and the bracket, for a checkpoint."""
        return {"integrals": self.integrals.state, "bracket": self.backward.state if self.backward else []}

    def restore(self, state: Mapping[str, Any]) -> list[Tensor]:
        """Take the accumulators of a checkpoint; its bracket."""
        self.integrals.restore(state["integrals"])
        bracket: list[Tensor] = state["bracket"]
        return bracket


def sample_points(points: int, count: int) -> Int[Tensor, " sample"]:
    """So many of the points, evenly spread, as those of every split stand together.

    >>> sample_points(10, 4).tolist(), sample_points(2, 4).tolist()
    ([1, 3, 6, 8], [0, 1])
    """
    few = min(count, points)
    return (torch.arange(few) * points + points // 2) // max(few, 1)
