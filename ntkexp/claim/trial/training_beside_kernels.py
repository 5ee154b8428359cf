"""Networks in training beside regression with kernels that stand still, width by width, at every step alike:

    f̂_{t+1}(x) = f̂_t(x) − η Σ_i K(x, x_i) (f̂_t(x_i) − y_i),    f̂_0 = f_0
    gap        √(E_t,x (f_t(x) − f̂_t(x))²/E_t,x (f_t(x) − f_0(x))²)

over points x that were not learned and so many networks. Rows are told apart by `kernel`: `start`, each network's K_0,
by which its linearisation trains as well, and `limit`, that of infinite width.
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
from ntkexp.ensemble.stacked import StackedNetworks, stacked
from ntkexp.ensemble.train import EnsembleTraining
from ntkexp.init.base import AbstractInit
from ntkexp.limit.blocks import BlockPlace, compute
from ntkexp.loss.squared import Squared
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.learning_task import LearningTask
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class TrainingBesideKernels(AbstractTrial):
    """Networks of each width learn targets of one number, by steps of `stable` · 2/λ_max of the limit."""

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64, 128, 256, 512, 1024), min_length=2)
    networks: Count = 4
    steps: Count = 60
    stable: float = Field(0.5, gt=0, le=1)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        x, points = data.train.inputs, torch.cat([data.train.inputs, data.test.inputs])
        task, generator, train = LearningTask(tuple(x.shape[1:]), 1), stream("weights", seed), len(x)
        network = self.model.limit(self.init, task)
        place = BlockPlace(slice(0, len(points)), slice(0, len(points)), same=True)
        limit = self.init.alpha**2 * compute(network, place, points, memory_gb=1.0, threads=1).ntk
        size = self.stable * 2 / float(torch.linalg.eigvalsh(limit[:train, :train])[-1])
        training = EnsembleTraining(
            points, targets(data, Squared())[:train], size, self.steps, divisor=1.0, readout=False
        )
        found: list[Mapping[str, Level]] = []
        for width in self.widths:
            modules = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            drawn = stacked(modules)
            kernels = {"start": drawn.tangent_kernels(points), "limit": limit}
            gaps = compared(training, drawn, {name: kernel[..., :train] for name, kernel in kernels.items()})
            found += [{"width": width, "kernel": name, "gap": gap} for name, gap in gaps.items()]
        return found


def compared(
    training: EnsembleTraining, drawn: StackedNetworks, kernels: Mapping[str, Float[Tensor, "*network point train"]]
) -> dict[str, float]:
    """Train networks, and kernels beside them; find the gap of each."""
    train = len(training.targets)
    with torch.no_grad():
        start = drawn.outputs(training.inputs)
    regressed = dict.fromkeys(kernels, start)
    moved, missed = 0.0, dict.fromkeys(kernels, 0.0)
    course = training.course(drawn)
    next(course)
    for networks in course:
        with torch.no_grad():
            outputs = networks.outputs(training.inputs)
        moved += float((outputs - start)[:, train:].square().sum())
        for name, kernel in kernels.items():
            here = regressed[name]
            regressed[name] = here - training.size / training.divisor * kernel @ (here[:, :train] - training.targets)
            missed[name] += float((outputs - regressed[name])[:, train:].square().sum())
    return {name: (far / moved) ** 0.5 for name, far in missed.items()}
