"""How much of a mode is learned. Of a mode with eigenvalue λ training removes the share λ g(λ) of what is missing:

    flow      g(λ) = (1 − e^{−sλ})/λ        g(0) = s      s the flow's time, weights of the loss included
    descent   g(λ) = (1 − (1 − sλ)ᵏ)/λ      g(0) = ks     k steps of size s
    for ever  g(λ) = 1/λ

>>> lone = torch.tensor([1.0], dtype=torch.float64)
>>> [float(each(lone)) for each in (FlowGain(math.log(2)), DescentGain(0.5, 2), FOREVER)]
[0.5, 0.75, 1.0]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.mistake import Mistake


class AbstractGain(ABC):
    """A way to train, for some time."""

    @abstractmethod
    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        """The gains g at eigenvalues that are not negative."""

    @property
    @abstractmethod
    def doubled(self) -> AbstractGain:
        """The gain of training for twice as long."""


@dataclass(frozen=True)
class FlowGain(AbstractGain):
    """Gradient flow; without end where the time is infinite."""

    time: float

    def __post_init__(self) -> None:
        if not self.time >= 0:
            raise Mistake(f"time={self.time:g}: it takes a number ≥ 0, or inf")

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        zero = spectrum == 0
        if self.time == math.inf:
            refuse_singular(zero)
            return 1 / spectrum
        return torch.where(zero, self.time, -torch.expm1(-self.time * spectrum) / torch.where(zero, 1.0, spectrum))

    @property
    def doubled(self) -> FlowGain:
        return FlowGain(2 * self.time)


FOREVER = FlowGain(math.inf)


@dataclass(frozen=True)
class DescentGain(AbstractGain):
    """Gradient descent; it diverges where the largest sλ exceeds 2."""

    size: float
    steps: int

    def __call__(self, spectrum: Float[Tensor, " mode"]) -> Float[Tensor, " mode"]:
        zero, moved = spectrum == 0, self.size * spectrum
        near = -torch.expm1(self.steps * torch.log1p(-moved.clamp(max=1)))
        far = 1 - (-1) ** self.steps * (moved - 1).clamp(min=0) ** self.steps
        share = torch.where(moved < 1, near, far)
        return torch.where(zero, self.size * self.steps, share / torch.where(zero, 1.0, spectrum))

    @property
    def doubled(self) -> DescentGain:
        return DescentGain(self.size, 2 * self.steps)


def refuse_singular(zero: Tensor) -> None:
    """A mode of eigenvalue zero has no inverse, and is not learned at any time."""
    if zero.any():
        raise singular(f"{int(zero.sum())} of {len(zero)} eigenvalues")


def singular(what: str) -> Mistake:
    """The mistake of a kernel without an inverse, with advice."""
    return Mistake(
        f"the kernel is singular ({what} are zero to rounding), so training without end has no closed form; give a "
        "finite time, or a ridge > 0"
    )
