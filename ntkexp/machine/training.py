"""How training went, as far as outputs are concerned: numbers and matrices, and the steps to be taken once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor


class Repeated(NamedTuple):
    """Where training with a fixed kernel Θ ends: f = f_0 + Θ(·, X) a + (ρ − 1) J·θ_0."""

    coefficients: Float[Tensor, "train out"]  # a
    remaining: Float[Tensor, ""]  # ρ, what decay leaves of the weights at the start


Repeat: TypeAlias = Callable[
    [Float[Tensor, "row column"], Float[Tensor, "train out"], Float[Tensor, "train out"]], Repeated
]
"""The steps that training took, with the matrix Θ(X, X), from f_0(X), while J(X)·θ_0 decays; or `DoesNotApply`."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training is known by so much, as far as outputs are concerned."""

    time: float  # Σ_s η_s
    weight: float  # wᵢℓ″ of full-batch training, where it is the same everywhere
    is_quadratic: bool  # in the outputs, least at the targets
    is_plain: bool  # whether the gradient of the moment, of all examples, alone moves the weights, all of them alike
    is_flow: bool  # whether they move on a curve instead of in steps
    mean_coefficients: Float[Tensor, "train out"] | None  # −Σ_s η_s ℓ′(s)/Σ_s η_s; none where gradients are remembered
    repeat: Repeat

    @property
    def is_closed(self) -> bool:
        """Whether small steps with a fixed kernel follow the gradient of a quadratic function of f, in closed form."""
        return self.is_quadratic and self.is_plain

    @property
    def manner(self) -> str:
        """How a machine is trained that repeats the training of the network."""
        return f"flow to t={self.time:.4g}" if self.is_flow else "same steps"
