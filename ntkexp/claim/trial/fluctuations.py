"""How far trained networks differ by their starts, width by width:

    fluctuation    √mean_x Var f_T(x)/mean_x f̄_T(x)²

over networks that all start at zero (of `init.antisymmetric`), trained by the same steps on the same data.
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
from ntkexp.ensemble.problem import targets
from ntkexp.ensemble.train import EnsembleTraining
from ntkexp.init.ntk import NTK
from ntkexp.library import tangent_kernel
from ntkexp.loss.squared import Squared
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.mlp import MLP
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class Fluctuations(AbstractTrial):
    """Networks of each width learn targets of one number, and are read at the points that they have not seen."""

    model: MLP
    init: NTK
    data: AbstractSource
    widths: tuple[Count, ...] = Field((32, 64, 128, 256), min_length=2)
    networks: Count = 20
    steps: Count = 200

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        train, generator = len(data.train.inputs), stream("weights", seed)
        task = LearningTask(tuple(data.train.inputs.shape[1:]), 1)
        x = torch.cat([data.train.inputs, data.test.inputs])
        learned = targets(data, Squared())[:train]

        def trained(width: int) -> Float[Tensor, "network point"]:
            modules = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            kernel = tangent_kernel(modules[0], x[:train], x[:train]).view(train, train)
            size = 1 / float(torch.linalg.eigvalsh(kernel)[-1])
            return EnsembleTraining(x, learned, size, self.steps, divisor=1.0, readout=False).outputs(modules)[..., 0]

        return [{"width": width, "fluctuation": fluctuation(trained(width)[:, train:])} for width in self.widths]


def fluctuation(outputs: Float[Tensor, "network point"]) -> float:
    """Compare the spread over networks with the size of their mean.

    >>> fluctuation(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    0.5
    """
    spread, size = outputs.var(0, correction=0).mean(), outputs.mean(0).square().mean()
    return float((spread / size).sqrt())
