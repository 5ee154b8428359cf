"""The kernels of an architecture as its width goes to infinity, outputs scaled as `init` says: α²𝒢 and α²Θ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.kernel_file.fill.filler import AbstractFiller, Blocks
from ntkexp.kernel_file.fill.recipe import AbstractRecipe
from ntkexp.limit.blocks import BlockPlace, compute
from ntkexp.limit.network import Network
from ntkexp.model.learning_task import LearningTask

RATE = 1e-10  # seconds for a pair of pixels in a layer; the fused engine takes a few times as long


@dataclass(frozen=True)
class Limit(AbstractFiller):
    """The filler for a network of layers of infinite width."""

    experiment: Experiment
    network: Network
    memory_gb: float  # of one tile

    @property
    def names(self) -> tuple[str, ...]:
        return ("nngp", "ntk")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def kernel(self) -> dict[str, Any]:
        layers = [layer.fields() for layer in self.network.layers]
        return {"kind": "limit", "layers": layers, "alpha": self.experiment.init.alpha}

    @property
    def concurrent(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return self.network.work * RATE

    def between(self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]) -> Blocks:
        return self.block(left, right, BlockPlace(slice(0, len(left)), slice(0, len(right)), same=False))

    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        everything = slice(0, len(points))
        return self.block(points, points, BlockPlace(everything, everything, same=True))

    def block(self, left: Tensor, right: Tensor, place: BlockPlace) -> Blocks:
        """Compute both kernels, scaled."""
        found = compute(self.network, place, left, right, memory_gb=self.memory_gb, threads=1)
        scale = self.experiment.init.alpha**2
        return {"nngp": scale * found.nngp[:, None, :, None], "ntk": scale * found.ntk[:, None, :, None]}


@dataclass(frozen=True)
class LimitRecipe(AbstractRecipe):
    """The limit of the experiment's architecture."""

    def filler(self, experiment: Experiment, data: Data, workers: int) -> Limit:
        return limit_of(experiment, data, workers)


def limit_of(experiment: Experiment, data: Data, workers: int) -> Limit:
    """Find the architecture's limit for these data; to have none is a mistake."""
    task = LearningTask(tuple(data.train.inputs.shape[1:]), 1, data.vocabulary)
    return Limit(experiment, experiment.model.limit(experiment.init, task), experiment.room_gb / workers)
