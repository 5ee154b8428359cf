"""Steps that are linear in all gradients so far (descent, momentum, Nesterov): the sum backwards is the rule.

    U ← scale ⊙ a + carry · U,        p̂ = −(past · U + now ⊙ a)

with the coefficients of `optimizer.base`, which do not depend on the weights: they are the same in both trainings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.removal.rerun import Rerun
from ntkexp.removal.rule.base import AbstractDifferenceRule, Adjoints, StepEnds

BRACKET = "bracket"


@dataclass(frozen=True)
class LinearDifference(AbstractDifferenceRule):
    """The recursion of the optimizer says everything."""

    rerun: Rerun

    def back(
        self, ends: StepEnds, weights: Float[Tensor, "direction weight"], memory: Adjoints
    ) -> tuple[Float[Tensor, "direction weight"], Adjoints]:
        flat, sizes = self.rerun.flat, self.rerun.sizes(ends.index)
        found = self.rerun.optimizer.recursion(ends.index, self.rerun.start, sizes, {})
        bracket = flat.vector(found.scale) * weights + found.carry * memory.get(BRACKET, torch.zeros_like(weights))
        pulled = -found.past * bracket
        if found.now is not None:
            pulled = pulled - self.rerun.spread(found.now) * weights
        return pulled, {BRACKET: bracket}
