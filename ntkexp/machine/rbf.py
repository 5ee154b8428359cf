"""Controls: a Gaussian kernel that has nothing to do with the network, k(x, x′) = exp(−‖x − x′‖²/2h²), with h the
median distance between training examples.

As an identity it replaces 𝒦 in "divide by the kernel and multiply with it again",

    f̂(x) = f_0(x) + Σᵢ aᵢ(x) k(x, xᵢ),    aᵢ(x) = 𝒮(x, xᵢ)/k(x, xᵢ),

which is exact by construction: that is the point of the criticism. As a regression it has to predict.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, Prediction, refuse_none
from ntkexp.machine.evidence import DoesNotApply, Evidence
from ntkexp.machine.regression import regression
from ntkexp.on_disk import places


class RBFIdentity(AbstractMachine):
    """Any kernel would do, as long as the coefficients may depend on the query."""

    control = True

    def predict(self, evidence: Evidence) -> Prediction:
        points, train = evidence.inputs[evidence.read], evidence.inputs[: evidence.train]
        width = median_distance(train)

        def rows(place: slice) -> Float[Tensor, "probe train"]:
            kernel = gaussian(points[place], train, width)
            if (kernel == 0).any():
                far = "the Gaussian kernel vanishes between distant points, so nothing can be divided by it"
                raise DoesNotApply(far)
            return kernel

        return Prediction(
            evidence.after(divided(evidence.path.contributions, rows) + evidence.path.decay),
            f"h={width:.3g}, 𝒮 by {evidence.rule}",
            partial=True,
        )


class RBFRegression(AbstractMachine):
    """The same kernel with coefficients that may not."""

    control = True

    def predict(self, evidence: Evidence) -> Prediction:
        refuse_none(evidence.kernel_start)
        train = evidence.inputs[: evidence.train]
        width = median_distance(train)
        kernel = gaussian(evidence.inputs, train, width)
        outputs = torch.eye(evidence.start.shape[1], dtype=kernel.dtype, device=kernel.device)
        prediction = regression(kernel[:, None, :, None] * outputs[:, None], evidence)
        return Prediction(prediction.outputs, f"h={width:.3g}, {prediction.detail}")


def divided(
    contributions: Float[Tensor, "probe out train"], rows: Callable[[slice], Float[Tensor, "probe train"]]
) -> Float[Tensor, "probe out"]:
    """Divide by a kernel, multiply with it again, and add up: some rows at a time."""
    around = ((contributions[place], rows(place)[:, None]) for place in places(contributions))
    return torch.cat([(parts / divisor * divisor).sum(2) for parts, divisor in around])


def gaussian(
    points: Float[Tensor, "probe feature"], train: Float[Tensor, "train feature"], width: float
) -> Float[Tensor, "probe train"]:
    """Compute the kernel of width h."""
    return torch.cdist(points, train).square_().div_(-2 * width**2).exp_()


def median_distance(points: Float[Tensor, "train feature"]) -> float:
    """Find the median of the distances that are not zero; 1 if all are.

    >>> median_distance(torch.tensor([[0.0], [3.0], [7.0]])), median_distance(torch.zeros(1, 1))
    (4.0, 1.0)
    """
    distances = torch.cdist(points, points).flatten().cpu().numpy()
    zeros = len(distances) - np.count_nonzero(distances)
    if zeros == len(distances):
        return 1.0
    place = zeros + (len(distances) - zeros - 1) // 2
    distances.partition(place)  # in place: they are many
    return float(distances[place])
