"""How far the kernel of a finite step is from the tangent kernel, step size by step size:

    error            ‖k̃_η − k‖/‖k‖ between the probe points and the first training examples
    centred_error    the same of (k̃_η + k̃_{−η})/2, in which the first order cancels

Networks are drawn by the seed; a function that starts where its fields say gets scatter·N(0, 1) added to its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.scalar_curve import noise_like
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.init.base import AbstractInit
from ntkexp.library import finite_step_kernel, tangent_kernel
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.functional import weights_of
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class FiniteSteps(AbstractTrial):
    """A model is read on data: at `points` of them, after steps on each of `observed` others."""

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    step_sizes: tuple[Annotated[float, Field(gt=0)], ...] = Field((0.1, 0.03, 0.01), min_length=2)
    points: Count = 16
    observed: Count = 4
    scatter: float = Field(0.0, ge=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        generator = stream("weights", seed)
        module = self.model.module(self.init, tuple(data.train.inputs.shape[1:]), 1, generator, data.vocabulary).eval()
        weights = {
            name: weight + self.scatter * noise_like(weight, generator) for name, weight in weights_of(module).items()
        }
        seen = torch.cat([data.train.inputs, data.probe.inputs, data.test.inputs])[: self.points]
        observed = data.train.inputs[: self.observed]
        tangent = tangent_kernel(module, seen, observed, weights=weights)

        def finite(step_size: float) -> Tensor:
            return finite_step_kernel(module, seen, observed, step_size, weights=weights)

        def missed(kernel: Tensor) -> float:
            return float((kernel - tangent).norm() / tangent.norm())

        return [
            {"step_size": eta, "error": missed(finite(eta)), "centred_error": missed((finite(eta) + finite(-eta)) / 2)}
            for eta in self.step_sizes
        ]
