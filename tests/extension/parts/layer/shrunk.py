"""σ(z) = z/2, with K′ = K/4 and Θ′ = Θ/4."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ntkexp.covariance.covariance import Covariance, Signal
from ntkexp.covariance.pairs import Operations, weigh
from ntkexp.layer import AbstractLayer


class Shrunk(AbstractLayer):
    """A layer with a limit and a fused form."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return Half()

    def carry(self, signal: Signal) -> Signal:
        return signal

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        return covariance.map(lambda values: values / 4)

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (weigh(register, scale=0.25),)


class Half(nn.Module):
    """The module of the layer."""

    def forward(self, z: Tensor) -> Tensor:
        return z / 2
