"""Functions of one number with one value: small enough that every parameter and every kernel can be looked at.

Their parameters start where their fields say, whatever the seed; `width` and the scales of `init` play no part.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.learning_task import LearningTask


class AbstractScalar(AbstractArchitecture):
    """A scalar function of a scalar."""

    @abstractmethod
    def function(self) -> nn.Module:
        """The function [example, 1] → [example, 1] at its start."""

    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        task.refuse_tokens(self.option)
        if task.shape != (1,) or task.outputs != 1:
            raise Mistake(
                f"model={self.option} has one value for one number; {task.said}, and {task.outputs} outputs are asked "
                "for; choose data=integers"
            )
        return self.function()


def parameter(*values: float) -> nn.Parameter:
    """Parameters with these values at the start."""
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))
