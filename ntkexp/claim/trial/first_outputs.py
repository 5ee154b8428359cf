"""What networks say before training, beside the Gaussian process that they are at infinite width, width by width:

    variance_ratio     mean_x E f(x)²/𝒢(x, x)                    1 at every width
    covariance_ratio   Σ E f(x)f(x′) 𝒢(x, x′)/Σ 𝒢(x, x′)²        1 at every width; the sums go over pairs x ≠ x′
    excess_kurtosis    mean_x E f(x)⁴/(E f(x)²)² − 3             of one hidden layer 3 Var(v)/(E v)²/width,
                                                                 v the variance of f given the hidden units' weights

over so many networks drawn for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.network_of_width import network_of_width
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.ensemble.train import EnsembleTraining
from ntkexp.init.base import AbstractInit
from ntkexp.limit.blocks import BlockPlace, compute
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.mlp import MLP
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class FirstOutputs(AbstractTrial):
    """Networks of one output are drawn at every width, and read at the first points of the data."""

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((4, 8, 16, 32), min_length=2)
    networks: Count = 2000
    points: Count = 8

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        task, generator = LearningTask(tuple(x.shape[1:]), 1), stream("weights", seed)
        every = slice(0, len(x))
        limit = self.model.limit(self.init, task)
        process = compute(limit, BlockPlace(every, every, same=True), x, memory_gb=1.0).nngp

        def drawn(width: int) -> Float[Tensor, "network point"]:
            modules = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            untrained = EnsembleTraining(x, x.new_zeros(0, 1), size=0.0, steps=0, divisor=1.0, readout=False)
            return untrained.outputs(modules)[..., 0]

        return [{"width": width, **moments(drawn(width), process)} for width in self.widths]


def moments(outputs: Float[Tensor, "network point"], process: Float[Tensor, "point point_"]) -> Mapping[str, float]:
    """Find all numbers of outputs whose mean is known to be zero.

    >>> import torch
    >>> moments(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    {'variance_ratio': 1.0, 'covariance_ratio': 2.0, 'excess_kurtosis': -2.0}
    """
    second, fourth = outputs.square().mean(0), outputs.pow(4).mean(0)
    found, pairs = outputs.t() @ outputs / len(outputs), process - process.diagonal().diag()
    return {
        "variance_ratio": float((second / process.diagonal()).mean()),
        "covariance_ratio": float((found * pairs).sum() / pairs.square().sum()),
        "excess_kurtosis": float((fourth / second.square()).mean()) - 3,
    }
