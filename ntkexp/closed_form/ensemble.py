"""What networks of infinite width say that are trained from random starts (Lee et al. 2019, arXiv:1902.06720).

With the tangent kernel Θ, the kernel 𝒢 of the outputs before training, g of `gain` and A = Θ(x, X) g(R), one
network and all of them together obey

    f_t(x) = f_0(x) + A (y − f_0(X))
    mean  A y,    covariance  𝒢(x, x′) + A 𝒢(X, X) A′ᵀ − A 𝒢(X, x′) − 𝒢(x, X) A′ᵀ.

Where the readout alone is trained, Θ = 𝒢, and without end and noise these are the posterior of the Gaussian process 𝒢.

>>> import torch
>>> from ntkexp.closed_form.gain import FOREVER
>>> from ntkexp.closed_form.modes import modes_of
>>> one = torch.ones(1, 1, dtype=torch.float64)
>>> learned = modes_of(4 * one).at(FOREVER)
>>> trained = Ensemble(2 * one, Kernels(one, one), learned)  # at a point where f_0 is f_0(X)
>>> float(trained.mean(3 * one)), float(trained.variance(one[0]))
(1.5, 0.25)
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.modes import Learned


@dataclass(frozen=True)
class Kernels:
    """A kernel is known among the training examples, and between points and them."""

    train: Float[Tensor, "train train"]
    cross: Float[Tensor, "point train"]


@dataclass(frozen=True)
class Ensemble:
    """Networks from random starts, at some points. `learned` is g(R), R made of Θ(X, X), and `cross` is Θ(x, X)."""

    cross: Float[Tensor, "point train"]
    start: Kernels
    learned: Learned

    @property
    def weights(self) -> Float[Tensor, "point train"]:
        """The weights A say what each training target adds at each point."""
        return self.learned(self.cross.mH).mH

    def mean(self, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        """The mean over random starts."""
        return self.cross @ self.learned(targets)

    def covariance(self, start: Float[Tensor, "point point"]) -> Float[Tensor, "point point"]:
        """The covariance of one output between points comes from 𝒢 between them (`start`)."""
        A = self.weights
        crossed = A @ self.start.cross.mH
        return start + A @ self.start.train @ A.mH - crossed - crossed.mH

    def variance(self, start: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """The variance is the diagonal of the covariance."""
        A = self.weights
        return start + (A @ self.start.train * A).sum(1) - 2 * (A * self.start.cross).sum(1)
