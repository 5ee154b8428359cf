"""Training with a fixed kernel Θ, in function space.

Under squared loss with weights w, gradient flow has the closed form (λ the eigenvalues of Θ(X, X), t the time)

    f_t(x) = f_0(x) − Θ(x, X) g(Θ(X, X)) (f_0(X) − y),    g(λ) = (1 − e^{−twλ})/λ,  g(0) = tw,

and for any loss, steps of gradient descent are

    f_{s+1}(x) = f_s(x) − η_s Θ(x, X) ℓ′(f_s(X)).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import Evidence, applied, square


def flow(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Float[Tensor, "probe out"]:
    """f_t at the time at which training ended."""
    matrix = square(kernel)
    spectrum, modes = torch.linalg.eigh((matrix + matrix.mH) / 2)
    gain = decayed(spectrum.clamp(min=0), evidence.course.time * evidence.course.weight)
    missing = (evidence.start[: evidence.train] - evidence.targets).flatten()
    coefficients = -(modes @ (gain * (modes.mH @ missing)))
    return evidence.start + applied(kernel, coefficients.view(evidence.targets.shape))


def decayed(spectrum: Float[Tensor, " mode"], time: float) -> Float[Tensor, " mode"]:
    """(1 − e^{−tλ})/λ, finite at λ = 0.

    >>> decayed(torch.tensor([0.0, 1e300], dtype=torch.float64), 2.0).tolist()
    [2.0, 1e-300]
    """
    zero = spectrum == 0
    return torch.where(zero, time, -torch.expm1(-time * spectrum) / torch.where(zero, 1.0, spectrum))


def descent(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Float[Tensor, "probe out"]:
    """f_T after the steps that training took."""
    train = evidence.train
    outputs = evidence.start[:train].clone()
    matrix = square(kernel)
    summed = torch.zeros_like(outputs)
    for step, step_size in enumerate(evidence.course.step_sizes):
        pull = step_size * evidence.course.output_gradient(step, outputs)
        summed += pull
        outputs -= (matrix @ pull.flatten()).view_as(outputs)
    return evidence.start - applied(kernel, summed)
