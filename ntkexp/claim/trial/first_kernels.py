"""The tangent kernels of networks before training, beside the one that they have at infinite width, width by width:

    distance    √(E ‖K_0 − K_∞‖²)/‖K_∞‖                  ∝ width^(−1/2)
    variance    Σ_xx′ Var K_0(x, x′)/‖K_∞‖²              ∝ 1/width

over so many networks drawn for each. The distance counts what their mean is off as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.network_of_width import network_of_width
from ntkexp.component import LARGEST, Count
from ntkexp.data.base import AbstractSource
from ntkexp.ensemble.stacked import stacked
from ntkexp.init.base import AbstractInit
from ntkexp.limit.blocks import BlockPlace, compute
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.learning_task import LearningTask
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class FirstKernels(AbstractTrial):
    """Networks of one output are drawn at every width, and their kernels read among the first points of the data."""

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64, 128, 256, 512, 1024), min_length=2)
    networks: int = Field(10, ge=2, le=LARGEST)
    points: Count = 32

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        task, generator = LearningTask(tuple(x.shape[1:]), 1), stream("weights", seed)
        every = slice(0, len(x))
        network = self.model.limit(self.init, task)
        limit = compute(network, BlockPlace(every, every, same=True), x, memory_gb=1.0, threads=1).ntk

        def kernels(width: int) -> Float[Tensor, "network point point_"]:
            drawn = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            return stacked(drawn).tangent_kernels(x)

        return [{"width": width, **beside(kernels(width), self.init.alpha**2 * limit)} for width in self.widths]


def beside(kernels: Float[Tensor, "network point point_"], limit: Float[Tensor, "point point_"]) -> Mapping[str, float]:
    """Find both numbers.

    >>> import torch
    >>> beside(torch.tensor([[[1.0]], [[3.0]]]), torch.ones(1, 1))
    {'distance': 1.4142135623730951, 'variance': 2.0}
    """
    size = float(limit.square().sum())
    missed = float((kernels - limit).square().sum((1, 2)).mean())
    return {"distance": (missed / size) ** 0.5, "variance": float(kernels.var(0).sum()) / size}
