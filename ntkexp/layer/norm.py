"""Normalisation: y = c/√(mean c² + ε) with c = x − mean x, then a gain (from one) and a bias (from zero).

Layer norm takes its means over channels, pixel by pixel; group norm over groups of channels and all pixels; batch norm
in evaluation, the only way in which it couples no examples, over nothing: it keeps the statistics it starts with.

Of these only a layer norm without gain and bias has a kernel at infinite width, where the mean vanishes after weights:
K′ = K/√((q₁ + ε)(q₂ + ε)) with the variances q at both pixels, and Θ′ = Θ/√((q₁ + ε)(q₂ + ε)).
"""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from ntkexp.component import Count
from ntkexp.covariance.covariance import Covariance
from ntkexp.covariance.operation import Operations, norm
from ntkexp.covariance.pairs import Pairs
from ntkexp.covariance.signal import Signal
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.by_name import named
from ntkexp.mistake import Mistake

EVALUATED = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


class LayerNorm(AbstractLayer):
    """Layer norm over channels; `affine` if gain and bias are there, and trained."""

    eps: float = Field(1e-12, gt=0)
    affine: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return ChannelNorm(shape[0], self.eps, self.affine)

    def carry(self, signal: Signal) -> Signal:
        signal.refuse_unmixed("LayerNorm")
        if self.affine:
            raise Mistake(
                "a layer norm whose gain is trained has no known limit of infinite width; choose affine=false "
                "(norm=layer_plain in a model)"
            )
        return signal

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs:
        return wanted or Pairs.equal(shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance.normalised(self.eps)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (norm(register, self.eps),)


class ChannelNorm(nn.LayerNorm):
    """Layer norm on the first axis of an example."""

    def __init__(self, channels: int, eps: float, affine: bool) -> None:
        super().__init__(channels, eps, affine, dtype=torch.float64)

    def forward(self, x: Float[Tensor, "example channel *pixels"]) -> Float[Tensor, "example channel *pixels"]:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class GroupNorm(AbstractLayer):
    """Group norm over groups of channels: the most, up to `groups`, that divide them."""

    groups: Count = 8
    eps: float = Field(1e-5, gt=0)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        groups = next(g for g in range(min(self.groups, shape[0]), 0, -1) if shape[0] % g == 0)
        return nn.GroupNorm(groups, shape[0], self.eps, dtype=torch.float64)


class BatchNorm(AbstractLayer):
    """Batch norm in evaluation, which is an affine map of each channel."""

    eps: float = Field(1e-5, gt=0)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return EVALUATED[len(shape)](shape[0], self.eps, dtype=torch.float64).eval()


NORMS: dict[str, LayerNorm | GroupNorm | BatchNorm | None] = {
    "none": None,
    "layer": LayerNorm(eps=1e-5, affine=True),
    "layer_plain": LayerNorm(eps=1e-5),
    "group": GroupNorm(),
    "batch": BatchNorm(),
}

Norm = Annotated[LayerNorm | GroupNorm | BatchNorm | None, BeforeValidator(named("norm", NORMS))]
"""A normalisation, its name, or none."""
