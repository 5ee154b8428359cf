"""What networks of infinite width say that are trained from random starts (Lee et al. 2019, arXiv:1902.06720).

With the tangent kernel Θ, the kernel 𝒢 of the outputs before training, g of `process.gain` and A = Θ(x, X) g(R), one
network and all of them together obey

    f_t(x) = f_0(x) + A (y − f_0(X))
    mean  A y,    covariance  𝒢(x, x′) + A 𝒢(X, X) A′ᵀ − A 𝒢(X, x′) − 𝒢(x, X) A′ᵀ.

Where the readout alone is trained, Θ = 𝒢, and without end and noise these are the posterior of the Gaussian process 𝒢.

>>> import torch
>>> from ntkexp.process.gain import Flow
>>> one = torch.ones(1, 1, dtype=torch.float64)
>>> trained = Ensemble(Kernels(4 * one, 2 * one), Kernels(one, one), modes_of(4 * one))  # x where f_0 is f_0(X)
>>> float(trained.mean(Flow(float("inf")), 3 * one)), float(trained.variance(Flow(float("inf")), one[0]))
(1.5, 0.25)
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.process.gain import AbstractGain
from ntkexp.process.modes import Modes, modes_of


@dataclass(frozen=True)
class Kernels:
    """A kernel among the training examples, and between points and them."""

    train: Float[Tensor, "train train"]
    cross: Float[Tensor, "point train"]


@dataclass(frozen=True)
class Ensemble:
    """Networks from random starts, at some points. `modes` are those of Θ(X, X)."""

    tangent: Kernels
    start: Kernels
    modes: Modes
    ridge: float = 0.0

    def weights(self, gain: AbstractGain) -> Float[Tensor, "point train"]:
        """A: what each training target adds at each point."""
        return self.modes.learned(gain, self.tangent.cross.mH, self.ridge).mH

    def mean(self, gain: AbstractGain, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        """Over random starts."""
        return self.tangent.cross @ self.modes.learned(gain, targets, self.ridge)

    def covariance(self, gain: AbstractGain, start: Float[Tensor, "point point"]) -> Float[Tensor, "point point"]:
        """Of one output between points, from 𝒢 between them."""
        A = self.weights(gain)
        crossed = A @ self.start.cross.mH
        return start + A @ self.start.train @ A.mH - crossed - crossed.mH

    def variance(self, gain: AbstractGain, start: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """The diagonal of the covariance."""
        A = self.weights(gain)
        return start + (A @ self.start.train * A).sum(1) - 2 * (A * self.start.cross).sum(1)


def trained(tangent: Kernels, start: Kernels, ridge: float = 0.0) -> Ensemble:
    """All layers learn."""
    return Ensemble(tangent, start, modes_of(tangent.train), ridge)


def readout(start: Kernels, ridge: float = 0.0) -> Ensemble:
    """The last layer learns alone."""
    return Ensemble(start, start, modes_of(start.train), ridge)
