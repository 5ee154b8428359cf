"""What came of each step: all that its gradients contributed, and what decay of the weights took away.

    Σᵢ Δ𝒮(x, xᵢ; s) + Δ𝒟(x; s)        [step, probe, out],        whose sum over s is f_T(x) − f_0(x)

as far as the rule closes. By an optimizer that remembers nothing that is by how much the step moved the output; what
another remembers of a gradient counts where the gradient was taken. Long paths are told in stretches of 2, 4, 8, …
steps, the shortest that need no more than `MOST` numbers, or `FEWEST` stretches: a path may end sooner than planned, so
stretches are joined two by two when there would be too many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.path.domain import Domain

MOST, FEWEST = 2**23, 128
"""Numbers that all rules keep together, which are 67 MB, and stretches that are kept if they take more than that."""


def most_stretches(numbers: int) -> int:
    """How many stretches there are at most, each of so many numbers; an even count, so that all can be joined.

    >>> most_stretches(3840), most_stretches(10**6)
    (2184, 128)
    """
    return max(FEWEST, MOST // max(1, numbers) // 2 * 2)


@dataclass(kw_only=True)
class StepTotals:
    """Stretches of steps, one after another from the first step on, with their sums; `edges` are where they begin, and
    the step after the last.

    >>> totals = StepTotals(zero=torch.zeros(1, 1), most=2)
    >>> for step, added in enumerate([1.0, 2.0, 3.0]):
    ...     totals.add(step, slice(None), torch.tensor([[added]]))
    >>> totals.until(3), torch.stack(totals.sums).flatten().tolist()
    ((0, 2, 3), [3.0, 3.0])
    """

    zero: Float[Tensor, "probe out"]  # NaN at points where the path is not integrated
    most: int
    every: int = 1
    edges: list[int] = field(default_factory=lambda: [0])
    sums: list[Float[Tensor, "probe out"]] = field(default_factory=list)

    def add(self, step: int, rows: slice | Int[Tensor, " chosen"], added: Float[Tensor, "chosen out"]) -> None:
        """Take in what came of a step at some of the points."""
        self.reach(step + 1)
        self.sums[bisect_right(self.edges, step) - 1][rows] += added

    def reach(self, steps: int) -> None:
        """Have stretches for so many steps, all but the last of them equally long."""
        while self.edges[-1] < steps:
            self.extend()

    def extend(self, end: int | None = None) -> None:
        """Have one stretch more, up to before this step, or as long as others are."""
        if len(self.sums) == self.most:
            self.join()
        self.edges.append(self.edges[-1] + self.every if end is None else end)
        self.sums.append(self.zero.clone())

    def join(self) -> None:
        """Make one stretch of every two."""
        self.sums = [first + second for first, second in zip(self.sums[::2], self.sums[1::2], strict=True)]
        self.edges = self.edges[::2]
        self.every *= 2

    def until(self, steps: int) -> tuple[int, ...]:
        """The edges, of a path that took so many steps."""
        return tuple(min(edge, steps) for edge in self.edges)

    def stacked(self) -> Float[Tensor, "stretch probe out"]:
        """The sums as one tensor."""
        return torch.stack(self.sums) if self.sums else self.zero.new_zeros(0, *self.zero.shape)

    @property
    def state(self) -> dict[str, Any]:
        """The sums, for a checkpoint."""
        return {"every": self.every, "edges": self.edges, "sums": self.stacked()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the sums of a checkpoint."""
        self.every, self.edges = state["every"], list(state["edges"])
        self.sums = list(state["sums"].to(self.zero.device).unbind())


def totals_at_zero(domain: Domain, rules: int) -> StepTotals:
    """No step taken yet, for one of so many rules."""
    zero = domain.room(2)
    return StepTotals(zero=zero, most=most_stretches(rules * zero.numel()))
