"""Gaussian processes: the posterior given noisy targets, what ensembles of infinite width say, and class
probabilities.

A Gaussian process conditioned on targets with noise of variance σ²:

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

What networks of infinite width say that are trained from random starts (Lee et al. 2019, arXiv:1902.06720).

With the tangent kernel Θ, the kernel 𝒢 of the outputs before training, g of `gain` and A = Θ(x, X) g(R), one
network and all of them together obey

    f_t(x) = f_0(x) + A (y − f_0(X))
    mean  A y,    covariance  𝒢(x, x′) + A 𝒢(X, X) A′ᵀ − A 𝒢(X, x′) − 𝒢(x, X) A′ᵀ.

Where the readout alone is trained, Θ = 𝒢, and without end and noise these are the posterior of the Gaussian process 𝒢.

>>> import torch
>>> from ntkexp.closed_form.modes import FOREVER
>>> from ntkexp.closed_form.modes import modes_of
>>> one = torch.ones(1, 1, dtype=torch.float64)
>>> learned = modes_of(4 * one).at(FOREVER)
>>> trained = Ensemble(2 * one, Kernels(one, one), learned)  # at a point where f_0 is f_0(X)
>>> float(trained.mean(3 * one)), float(trained.variance(one[0]))
(1.5, 0.25)

How probable each class is where outputs are Gaussian, and how well such probabilities are calibrated.

With means μ_c and one standard deviation σ, independent between outputs,

    P(c has the largest output) = E Π_{d≠c} Φ(z + (μ_c − μ_d)/σ),  z ~ N(0, 1);    of a single output  P(+) = Φ(μ/σ).

    negative log-likelihood      −mean log P(label)
    expected calibration error   Σ_bins share · |accuracy − mean confidence|   (Guo et al. 2017, 15 bins)

>>> probabilities(torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64))[0, 0].item().__round__(12)
0.333333333333
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.closed_form.modes import FOREVER, AbstractGain, Learned, modes_of


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


NODES, BINS = 48, 15


def probabilities(mean: Float[Tensor, "point out"], deviation: Float[Tensor, " point"]) -> Float[Tensor, "point class"]:
    """Find the probability of each class by Gauss–Hermite quadrature; one output stands for two classes."""
    scale = deviation.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)[:, None]
    if mean.shape[1] == 1:
        signed: Tensor = torch.special.ndtr(torch.cat([-mean, mean], 1) / scale)
        return signed
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.hermite_e.hermegauss(NODES))
    found = torch.stack([of_class(k, mean / scale, nodes, weights) for k in range(mean.shape[1])], 1)
    total: Tensor = found.sum(1, keepdim=True)
    return found / total


def of_class(
    chosen: int, mean: Float[Tensor, "point out"], nodes: Float[Tensor, " node"], weights: Float[Tensor, " node"]
) -> Float[Tensor, " point"]:
    """The probability that the output `chosen` is the largest; means are in units of the deviation."""
    others = [k for k in range(mean.shape[1]) if k != chosen]
    gaps = mean[:, [chosen]] - mean[:, others]
    below = torch.special.log_ndtr(nodes[:, None, None] + gaps).sum(2).exp()
    mean_below: Tensor = (weights[:, None] * below).sum(0) / weights.sum()
    return mean_below


def log_loss(found: Float[Tensor, "point class"], labels: Int[Tensor, " point"]) -> float:
    """Find the negative log-likelihood; a label that was thought impossible counts as improbable as numbers can say."""
    said = found[torch.arange(len(labels)), labels].clamp(min=torch.finfo(found.dtype).tiny)
    return float(0.0 - said.log().mean())


def calibration_error(found: Float[Tensor, "point class"], labels: Int[Tensor, " point"]) -> float:
    """How far confidence and accuracy are apart.

    >>> certain = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> calibration_error(certain, torch.tensor([1, 0]))
    0.5
    """
    confidence, chosen = found.max(1)
    right = (chosen == labels).to(confidence.dtype)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=confidence.dtype).index_add_(0, place, right - confidence)
    return float(gaps.abs().sum()) / len(labels)
