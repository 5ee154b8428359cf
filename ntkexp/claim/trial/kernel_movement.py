"""How far the tangent kernel moves while networks learn, by the width and by the scale α of their output:

    movement    √(E ‖K_T − K_0‖²/‖K_0‖²)        where α is large ∝ 1/α (Chizat, Oyallon & Bach 2019)
    test_error  mean (f_T − y)²/mean y²          on points that were not learned

over so many networks, which start as `init` says and take steps of `stable` · 2/λ_max(K_0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.network_of_width import network_of_width
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.ensemble.problem import targets
from ntkexp.ensemble.stacked import stacked
from ntkexp.ensemble.train import EnsembleTraining
from ntkexp.init.base import AbstractInit
from ntkexp.loss.squared import Squared
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.learning_task import LearningTask
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class KernelMovement(AbstractTrial):
    """Networks of each width learn targets of one number at each scale; those of a width are the same at all scales."""

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field(min_length=1)
    alphas: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=2)
    networks: Count = 10
    steps: Count = 100
    stable: float = Field(0.5, gt=0, le=1)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        x, points = data.train.inputs, torch.cat([data.train.inputs, data.test.inputs])
        task, encoded = LearningTask(tuple(x.shape[1:]), 1), targets(data, Squared())
        learned, truth = encoded[: len(x)], encoded[len(encoded) - len(data.test.inputs) :]

        def row(width: int, alpha: float) -> Mapping[str, Level]:
            init = self.init.model_copy(update={"alpha": alpha})
            generator = stream("weights", seed, width)
            drawn = stacked([network_of_width(width, self.model, init, task, generator) for _ in range(self.networks)])
            before = drawn.tangent_kernels(x)
            size = self.stable * 2 / float(torch.linalg.eigvalsh(before)[:, -1].max())
            after = EnsembleTraining(points, learned, size, self.steps, divisor=1.0, readout=False).trained(drawn)
            moved = (after.tangent_kernels(x) - before).square().sum((1, 2)) / before.square().sum((1, 2))
            with torch.no_grad():
                missed = after.outputs(points)[:, len(x) :] - truth
            error = float(missed.square().mean() / truth.square().mean())
            return {"width": width, "alpha": alpha, "movement": float(moved.mean().sqrt()), "test_error": error}

        return [row(width, alpha) for width in self.widths for alpha in self.alphas]
