"""A true kernel machine: the path kernel with coefficients that do not depend on the query,

f̂(x) = f_0(x) + Σᵢ 𝒦(x, xᵢ) āᵢ,    āᵢ = −Σ_s η_s ℓ′ᵢ(s) / Σ_s η_s.

Where the optimizer remembers, āᵢ is the least-squares fit of 𝒮(x, xᵢ) = 𝒦(x, xᵢ) āᵢ over the training points x.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, Prediction, apply_kernel, refuse_none
from ntkexp.machine.evidence import DoesNotApply, Evidence


class FixedCoefficients(AbstractMachine):
    """The coefficients are means over the path."""

    def predict(self, evidence: Evidence) -> Prediction:
        refuse_none(evidence.path.kernel)
        coefficients = evidence.training.mean_coefficients
        if coefficients is None:
            coefficients = fitted_coefficients(evidence)
        outputs = evidence.after(apply_kernel(evidence.path.kernel, coefficients))
        return Prediction(outputs, f"𝒦 by {evidence.rule}", partial=True)


def fitted_coefficients(evidence: Evidence) -> Float[Tensor, "train out_"]:
    """Σ_x 𝒦(x, xᵢ)ᵀ𝒦(x, xᵢ) āᵢ = Σ_x 𝒦(x, xᵢ)ᵀ𝒮(x, xᵢ), example by example, by pseudo-inverse."""
    here = evidence.attributed[: evidence.train].nonzero()[:, 0]
    if not len(here):
        raise DoesNotApply("no training example is attributed: add train to path.probes")
    kernel, parts = (part[here] for part in (evidence.path.kernel, evidence.path.contributions))
    kernel = kernel.permute(2, 0, 1, 3).flatten(1, 2)  # [train, point·out, out_]
    parts = parts.flatten(0, 1).t()[..., None]
    if not (kernel.isfinite().all() and parts.isfinite().all()):
        raise DoesNotApply("the path kernel among the training examples is not finite")
    coefficients: Tensor = torch.linalg.pinv(kernel) @ parts.to(kernel.dtype)  # 𝒮 is summed in float64
    return coefficients[..., 0]
