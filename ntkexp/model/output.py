"""How a network's output is read: scaled by α, made antisymmetric, centred (the formulas stand in `init.base`).

Each reading names the `terms` of which f is the sum.
"""

from __future__ import annotations

from copy import deepcopy
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake, first_line
from ntkexp.model.functional import called
from ntkexp.shapes import Weights


class ScaledOutput(nn.Module):
    """f = α Σ terms, the terms being plus and minus what networks of the same shape give."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__()
        self.network, self.alpha = network, alpha

    def terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x),)

    def trained_terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        """The terms that change in training."""
        return self.terms(x)

    def forward(self, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "example out"]:
        first, *rest = self.terms(x)
        total = sum(rest, start=first)
        return total if self.alpha == 1 else self.alpha * total

    def sizes(self, weights: Weights, x: Float[Tensor, "example *shape"]) -> Float[Tensor, "term example"]:
        """α‖trained term‖ for every example at these weights: f cannot be known to better than rounding of that."""
        there = {f"reading.{name}": weight for name, weight in weights.items()}
        with torch.no_grad():
            terms = called(TrainedTerms(self), there, (x,))
        return self.alpha * torch.stack([term.norm(dim=1) for term in terms])


class TrainedTerms(nn.Module):
    """A module's outputs are the trained terms of a reading."""

    def __init__(self, reading: ScaledOutput) -> None:
        super().__init__()
        self.reading = reading

    def forward(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return self.reading.trained_terms(x)


class Antisymmetric(ScaledOutput):
    """f = α (h(θ_a) − h(θ_b))/√2, equal halves at the start."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__(network, alpha / sqrt(2))
        self.mirror = copied(network, "antisymmetric")

    def terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x), -self.mirror(x))


class Centred(ScaledOutput):
    """f = α (h(θ) − h(θ_0)), θ_0 kept as constants."""

    def __init__(self, network: nn.Module, alpha: float) -> None:
        super().__init__(network, alpha)
        self.origin = copied(network, "centred").requires_grad_(False)

    def terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x), -self.origin(x))

    def trained_terms(self, x: Float[Tensor, "example *shape"]) -> tuple[Float[Tensor, "example out"], ...]:
        return (self.network(x),)


def read(network: nn.Module, init: AbstractInit) -> ScaledOutput:
    """The network with its output read as `init` says."""
    if init.antisymmetric:
        return Antisymmetric(network, init.alpha)
    return Centred(network, init.alpha) if init.centred else ScaledOutput(network, init.alpha)


def copied(network: nn.Module, key: str) -> nn.Module:
    """Copy a network."""
    try:
        return deepcopy(network)
    except Exception as error:  # what a module of the user's does when it is copied
        said = f"{type(error).__name__}: {first_line(error)}"
        raise Mistake(f"init.{key}=true needs a copy of the network, which cannot be copied: {said}") from None
