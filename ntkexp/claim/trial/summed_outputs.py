"""How far the kernel of summed outputs stands for the whole tangent kernel, width by width:

    error    ‖K − k ⊗ 1‖/‖K‖,    k(x, x′) = Σ_cd K(x, c; x′, d)/C

with K [point, output] × [point, output], and C outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.network_of_width import network_of_width
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.init.base import AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.mlp import MLP
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class SummedOutputs(AbstractTrial):
    """A network of each width, read before training at the first points of the data."""

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((32, 64, 128, 256, 512), min_length=2)
    outputs: Count = 10
    points: Count = 16

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        task, generator = LearningTask(tuple(x.shape[1:]), self.outputs), stream("weights", seed)

        def missed(width: int) -> float:
            return distance(tangent_kernel(network_of_width(width, self.model, self.init, task, generator), x, x))

        return [{"width": width, "error": missed(width)} for width in self.widths]


def distance(kernel: Float[Tensor, "point out point_ out_"]) -> float:
    """Compare a kernel with what its summed outputs make of it.

    >>> distance(torch.eye(3).view(1, 3, 1, 3))
    0.0
    """
    count = kernel.shape[1]
    summed = kernel.sum((1, 3)) / count
    stands = torch.einsum("xy,cd->xcyd", summed, torch.eye(count).to(summed))
    return float((kernel - stands).norm() / kernel.norm())
