"""A control: a random positive definite kernel, which knows neither the network nor the points,

    k = (A Aᵀ/r + I)[x, xᵢ],    A ~ N(0, 1) of points × r, r the number of points

in place of 𝒦 in "divide by the kernel and multiply with it again" (`machine.rbf`): exact by construction, for

    f̂(x) = f_0(x) + Σᵢ aᵢ(x) k(x, xᵢ),    aᵢ(x) = 𝒮(x, xᵢ)/k(x, xᵢ).

As a regression it predicts new points no better than chance, and reproduces those that it was fitted to.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, Prediction, refuse_none
from ntkexp.machine.evidence import DoesNotApply, Evidence
from ntkexp.machine.rbf import divided
from ntkexp.machine.regression import regression
from ntkexp.stream import stream


class RandomIdentity(AbstractMachine):
    """Even chance would do, as long as the coefficients may depend on the query."""

    control = True

    def predict(self, evidence: Evidence) -> Prediction:
        kernel = random_kernel(evidence)
        if (kernel == 0).any():
            raise DoesNotApply("the random kernel vanishes between two points, so nothing can be divided by it")
        change = divided(evidence.path.contributions, kernel[evidence.read].__getitem__)
        return Prediction(
            evidence.after(change + evidence.path.decay),
            f"rank {len(kernel)}, 𝒮 by {evidence.rule}",
            partial=True,
        )


class RandomRegression(AbstractMachine):
    """The same kernel with coefficients that may not."""

    control = True

    def predict(self, evidence: Evidence) -> Prediction:
        refuse_none(evidence.kernel_start)
        kernel = random_kernel(evidence)
        outputs = torch.eye(evidence.start.shape[1], dtype=kernel.dtype, device=kernel.device)
        prediction = regression(kernel[:, None, :, None] * outputs[:, None], evidence)
        return Prediction(prediction.outputs, prediction.detail)


def random_kernel(evidence: Evidence) -> Float[Tensor, "probe train"]:
    """Draw the kernel between all points and the training examples."""
    points = len(evidence.inputs)
    factor = torch.randn(points, points, generator=stream("random kernel"), dtype=torch.float64)
    kernel = (factor @ factor[: evidence.train].t()).div_(points)
    kernel.diagonal().add_(1.0)
    return kernel.to(evidence.end)
