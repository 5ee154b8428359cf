"""How probable each class is where outputs are Gaussian, and how well such probabilities are calibrated.

With means μ_c and one standard deviation σ, independent between outputs,

    P(c has the largest output) = E Π_{d≠c} Φ(z + (μ_c − μ_d)/σ),  z ~ N(0, 1);    of a single output  P(+) = Φ(μ/σ).

    negative log-likelihood      −mean log P(label)
    expected calibration error   Σ_bins share · |accuracy − mean confidence|   (Guo et al. 2017, 15 bins)

>>> probabilities(torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64))[0, 0].item().__round__(12)
0.333333333333
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

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
