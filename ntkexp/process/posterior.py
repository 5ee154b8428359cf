"""A Gaussian process conditioned on targets with noise of variance σ²:

    mean        K(x, X) (K(X, X) + σ²)⁻¹ y
    covariance  K(x, x′) − K(x, X) (K(X, X) + σ²)⁻¹ K(X, x′)

More generally, with g_{2s} in place of the inverse, the covariance of readouts that were trained for the time s: every
mode of the prior decays twice, once on either side. With noise this is the posterior's, not that of trained networks,
which is `Ensemble.covariance`.

>>> import torch
>>> one = torch.ones(1, 1, dtype=torch.float64)
>>> certain = Posterior(Kernels(one, one), modes_of(one), noise=1.0)
>>> float(certain.mean(one)), float(certain.variance(one[0]))
(0.5, 0.5)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.process.ensemble import Kernels
from ntkexp.process.gain import AbstractGain, Flow
from ntkexp.process.modes import Modes, modes_of

FOREVER = Flow(math.inf)


@dataclass(frozen=True)
class Posterior:
    """The process 𝒢 after it has seen the training targets."""

    prior: Kernels
    modes: Modes
    noise: float = 0.0

    def mean(self, targets: Float[Tensor, "train out"], gain: AbstractGain = FOREVER) -> Float[Tensor, "point out"]:
        """At every point."""
        return self.prior.cross @ self.modes.learned(gain, targets, self.noise)

    def covariance(
        self, prior: Float[Tensor, "point point"], gain: AbstractGain = FOREVER
    ) -> Float[Tensor, "point point"]:
        """Between points, from the prior's."""
        return prior - self.prior.cross @ self.modes.learned(gain.doubled, self.prior.cross.mH, self.noise)

    def variance(self, prior: Float[Tensor, " point"], gain: AbstractGain = FOREVER) -> Float[Tensor, " point"]:
        """The diagonal of the covariance."""
        explained = self.modes.learned(gain.doubled, self.prior.cross.mH, self.noise)
        return prior - (self.prior.cross.mH * explained).sum(0)


def conditioned(prior: Kernels, noise: float = 0.0) -> Posterior:
    """On values at the training inputs."""
    return Posterior(prior, modes_of(prior.train), noise)
