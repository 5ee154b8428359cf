"""A Gaussian process conditioned on targets with noise of variance σ²:

    mean        K(x, X) (K(X, X) + σ²)⁻¹ y
    covariance  K(x, x′) − K(x, X) (K(X, X) + σ²)⁻¹ K(X, x′)

More generally, with g_{2s} in place of the inverse, the covariance of readouts that were trained for the time s: every
mode of the prior decays twice, once on either side. With noise this is the posterior's, not that of trained networks,
which is `Ensemble.covariance`.

>>> import torch
>>> one = torch.ones(1, 1, dtype=torch.float64)
>>> certain = condition(Kernels(one, one), noise=1.0)
>>> float(certain.mean(one)), float(certain.variance(one[0]))
(0.5, 0.5)
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.ensemble import Kernels
from ntkexp.closed_form.gain import FOREVER, AbstractGain
from ntkexp.closed_form.modes import Learned, modes_of


@dataclass(frozen=True)
class Posterior:
    """The process 𝒢 after it has seen the training targets, or been trained on them: `learned` is g_s, `twice` g_2s."""

    cross: Float[Tensor, "point train"]
    learned: Learned
    twice: Learned

    def mean(self, targets: Float[Tensor, "train out"]) -> Float[Tensor, "point out"]:
        """The mean at every point."""
        return self.cross @ self.learned(targets)

    def covariance(self, prior: Float[Tensor, "point point"]) -> Float[Tensor, "point point"]:
        """The covariance between points comes from the prior's."""
        return prior - self.cross @ self.twice(self.cross.mH)

    def variance(self, prior: Float[Tensor, " point"]) -> Float[Tensor, " point"]:
        """The variance is the diagonal of the covariance."""
        return prior - (self.cross.mH * self.twice(self.cross.mH)).sum(0)


def condition(prior: Kernels, noise: float = 0.0, gain: AbstractGain = FOREVER) -> Posterior:
    """Condition the prior on values at the training inputs."""
    modes = modes_of(prior.train)
    return Posterior(prior.cross, modes.at(gain, noise), modes.at(gain.doubled, noise))
