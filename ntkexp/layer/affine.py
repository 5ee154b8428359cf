"""Affine layers, and what their weights are drawn from.

    ntk           z = W_std/√fan_in · W x + b_std · b     W, b ~ N(0, 1)
    standard      z = W x + b                             W ~ N(0, W_std²/fan_in), b ~ N(0, b_std²)
    mean_field    z = W_std/fan_in · W x + b_std · b      W, b ~ N(0, 1)

The factors multiply inside the matrix product, never the weight itself: a scaled weight would be a new tensor made of
parameters, and its tangent kernel would no longer factorise. There is no bias where b_std is zero.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from ntkexp.layer.base import AbstractLayer
from ntkexp.mistake import Mistake

Parametrisation = Literal["ntk", "standard", "mean_field"]


class Dense(AbstractLayer):
    """A fully connected layer with `features` outputs."""

    features: PositiveInt
    W_std: float = Field(1.0, gt=0)
    b_std: float = Field(0.0, ge=0)
    param: Parametrisation = "ntk"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 1:
            raise Mistake(
                f"Dense takes vectors, and was given examples of shape {list(shape)}; put a Flatten before it"
            )
        return (self.features,)

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        fan_in, fan_out = *shape, *self.shape(shape)
        weight = torch.randn(fan_out, fan_in, generator=generator, dtype=torch.float64)
        bias = torch.randn(fan_out, generator=generator, dtype=torch.float64) if self.b_std > 0 else None
        if self.param == "standard":
            return Affine(weight * (self.W_std / sqrt(fan_in)), None if bias is None else bias * self.b_std)
        gain = self.W_std / (fan_in if self.param == "mean_field" else sqrt(fan_in))
        return Affine(weight, bias, gain, self.b_std)


class Affine(nn.Module):
    """z = gain · x Wᵀ + shift · b."""

    def __init__(
        self,
        weight: Float[Tensor, "fan_out fan_in"],
        bias: Float[Tensor, " fan_out"] | None,
        gain: float = 1.0,
        shift: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.gain, self.shift = gain, shift

    def forward(self, x: Float[Tensor, "example fan_in"]) -> Float[Tensor, "example fan_out"]:
        if self.bias is None:
            return torch.mm(self.gain * x, self.weight.t())
        return torch.addmm(self.bias, x, self.weight.t(), beta=self.shift, alpha=self.gain)
