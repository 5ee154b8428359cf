"""Pointwise layers: one function applied to every element."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import BeforeValidator
from torch import Tensor, nn

from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.named import named


class AbstractPointwise(AbstractLayer):
    """z ↦ σ(z), element by element."""

    @abstractmethod
    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """σ(z)."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return Pointwise(self)


class Pointwise(nn.Module):
    """A pointwise layer as a module without weights."""

    def __init__(self, layer: AbstractPointwise) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.layer.apply(z)


class Linear(AbstractPointwise):
    """σ(z) = z."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return z


class ReLU(AbstractPointwise):
    """σ(z) = max(0, z)."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.relu(z)


class LeakyReLU(AbstractPointwise):
    """σ(z) = max(0, z) + slope · min(0, z)."""

    slope: float = 0.1

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.leaky_relu(z, self.slope)


class Erf(AbstractPointwise):
    """σ(z) = 2/√π ∫₀ᶻ exp(−t²) dt."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.erf(z)


class Tanh(AbstractPointwise):
    """σ(z) = tanh z."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.tanh(z)


class GELU(AbstractPointwise):
    """σ(z) = z Φ(z), Φ the distribution function of the normal law."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.gelu(z)


class SiLU(AbstractPointwise):
    """σ(z) = z / (1 + exp(−z))."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.nn.functional.silu(z)


class Sin(AbstractPointwise):
    """σ(z) = sin z."""

    def apply(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.sin(z)


ACTIVATIONS: dict[str, AbstractPointwise] = {
    "erf": Erf(),
    "gelu": GELU(),
    "leaky_relu": LeakyReLU(),
    "linear": Linear(),
    "relu": ReLU(),
    "silu": SiLU(),
    "sin": Sin(),
    "tanh": Tanh(),
}


Activation = Annotated[AbstractPointwise, BeforeValidator(named("activation", ACTIVATIONS))]
"""A pointwise layer, or its name."""
