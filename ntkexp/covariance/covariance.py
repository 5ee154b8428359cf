"""What layers push: covariances of one channel, pixel pair by pixel pair, and tangent kernels beside them.

    nngp   K[p, q](x, x′), the covariance at pixel p for x and at pixel q for x′
    ntk    Θ[p, q](x, x′), its tangent kernel

Two things are pushed. First the covariances of each example with itself (`layer.own`), because nonlinear layers need
the variances K[p, p](x, x), and pooling makes coarse variances of fine covariances. Then, with these at hand, the
kernels between the examples of two sides (`layer.cross`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, TypeVar

from torch import Tensor

from ntkexp.covariance.coarse import Coarse
from ntkexp.covariance.pairs import Pairs


@dataclass(frozen=True)
class PairEnd:
    """One end of many pairs: variances, and how a function of them is laid out beside the covariances."""

    variance: Tensor
    lay_out: Callable[[Tensor], Tensor]


Dual: TypeAlias = Callable[[PairEnd, Tensor, PairEnd], tuple[Tensor, Tensor]]
"""Variances at both ends and a covariance ↦ E σ(u) σ(v) and E σ′(u) σ′(v)."""
Alone: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A variance ↦ E σ(u)² and E σ′(u)²."""
Mix: TypeAlias = Callable[[Tensor, Pairs], Tensor]
"""A mean over the pairs that a window sees."""
Learn: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]
"""What m(K) and K′ add to the tangent kernel."""
Scalar: TypeAlias = Tensor | float


class AbstractCovariance(ABC):
    """A covariance is on its way through the layers."""

    @abstractmethod
    def affine(self, mix: Mix, scale: Scalar, shift: Scalar, learn: Learn) -> Self:
        """K′ = s m(K) + b, and Θ′ = s m(Θ) + what the layer's own weights learn."""

    @abstractmethod
    def pointwise(self, dual: Dual, alone: Alone) -> Self:
        """K′ = κ(K) and Θ′ = Θ · κ̇(K); where an example meets itself by the formula for that, which rounds nothing."""

    @abstractmethod
    def normalised(self, eps: float) -> Self:
        """Divide the covariance by √((q₁ + ε)(q₂ + ε))."""

    @abstractmethod
    def coarse(self, coarse: Sequence[Coarse]) -> Self:
        """Put the covariance on coarser pixels, axis by axis."""

    @abstractmethod
    def without_pixels(self) -> Self:
        """The covariance of an image of one pixel, which is then a vector."""

    @abstractmethod
    def following(self, branch: Self) -> Self:
        """This covariance at the entry of a branch that is walked after the other one, `branch`."""

    @abstractmethod
    def plus(self, last: Self) -> Self:
        """The sum with the branch that was walked last, of independent signals."""


Covariance = TypeVar("Covariance", bound=AbstractCovariance)
