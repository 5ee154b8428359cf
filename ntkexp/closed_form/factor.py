"""The Cholesky factor of a kernel with a ridge: a tenth of the cost of an eigendecomposition, for one ridge and t = ∞.

Where rounding makes R indefinite in spite of its ridge, a jitter is added to it, ten times as much at each attempt.

>>> found = factorise(torch.tensor([[3.0]], dtype=torch.float64), ridge=1.0)
>>> float(found.solve(torch.ones(1, 1, dtype=torch.float64))), found.jitter
(0.25, 0.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.gain import singular
from ntkexp.closed_form.modes import refuse_negative

ATTEMPTS = 6


@dataclass(frozen=True)
class Factor:
    """L is the factor of R + jitter = L Lᵀ."""

    lower: Float[Tensor, "entry entry"]
    jitter: float

    def solve(self, right: Float[Tensor, "entry column"]) -> Float[Tensor, "entry column"]:
        """Find (R + jitter)⁻¹ B."""
        return torch.cholesky_solve(right, self.lower)


def factorise(matrix: Float[Tensor, "entry entry"], ridge: float) -> Factor:
    """Factorise Θ + ridge; a matrix that is singular to rounding is refused where there is no ridge."""
    refuse_negative(ridge)
    rounding = len(matrix) * torch.finfo(matrix.dtype).eps * float(matrix.diagonal().mean())
    jitters = [0.0] + [rounding * 10.0**k for k in range(ATTEMPTS)] if ridge else [0.0]
    for jitter in jitters:
        work = matrix.clone()
        work.diagonal().add_(ridge + jitter)
        lower, failed = torch.linalg.cholesky_ex(work)
        if not failed and (ridge or float(lower.diagonal().min()) ** 2 > rounding):
            return Factor(lower, jitter)
    raise singular("some of its eigenvalues")
