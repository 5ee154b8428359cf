"""Controls: a Gaussian kernel that has nothing to do with the network, k(x, x′) = exp(−‖x − x′‖²/2h²), with h the
median distance between training examples.

As an identity it replaces 𝒦 in "divide by the kernel and multiply with it again",

    f̂(x) = f_0(x) + Σᵢ aᵢ(x) k(x, xᵢ),    aᵢ(x) = 𝒮(x, xᵢ)/k(x, xᵢ),

which is exact by construction: that is the point of the criticism. As a regression it has to predict.
"""

from __future__ import annotations

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
        kernel, width = gaussian(evidence)
        if (kernel == 0).any():
            raise DoesNotApply("the Gaussian kernel vanishes between distant points, so nothing can be divided by it")
        return Prediction(
            evidence.after(divided(evidence.path.contributions, kernel[evidence.read]) + evidence.path.decay),
            f"h={width:.3g}, 𝒮 by {evidence.rule}",
            partial=True,
        )


class RBFRegression(AbstractMachine):
    """The same kernel with coefficients that may not."""

    control = True

    def predict(self, evidence: Evidence) -> Prediction:
        refuse_none(evidence.kernel_start)
        kernel, width = gaussian(evidence)
        outputs = torch.eye(evidence.start.shape[1], dtype=kernel.dtype, device=kernel.device)
        prediction = regression(kernel[:, None, :, None] * outputs[:, None], evidence)
        return Prediction(prediction.outputs, f"h={width:.3g}, {prediction.detail}")


def divided(
    contributions: Float[Tensor, "probe out train"], kernel: Float[Tensor, "probe train"]
) -> Float[Tensor, "probe out"]:
    """Divide by a kernel, multiply with it again, and add up."""
    around = ((contributions[place], kernel[place, None]) for place in places(contributions))
    return torch.cat([(parts / divisor * divisor).sum(2) for parts, divisor in around])


def gaussian(evidence: Evidence) -> tuple[Float[Tensor, "probe train"], float]:
    """Find the kernel between all points and the training examples, and its width h."""
    distances = torch.cdist(evidence.inputs, evidence.inputs[: evidence.train])
    width = middle(distances[: evidence.train])
    return distances.square_().div_(-2 * width**2).exp_(), width


def middle(distances: Float[Tensor, "row column"]) -> float:
    """Find the median of those that are not zero, with one copy of them; 1 if all are.

    >>> middle(torch.tensor([[0.0, 3.0], [5.0, 4.0]])), middle(torch.zeros(1, 1))
    (4.0, 1.0)
    """
    zeros = distances.numel() - int(distances.count_nonzero())
    if zeros == distances.numel():
        return 1.0
    place = zeros + (distances.numel() - zeros - 1) // 2
    return float(np.partition(distances.cpu().numpy(), place, axis=None)[place])
