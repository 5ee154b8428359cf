"""Regression with a kernel that need be neither symmetric nor regular, by singular values:

f̂(x) = f_0(x) + K(x, X) K(X, X)⁺ (f_T(X) − f_0(X)),

singular values below `cutoff` times the largest counting as zero.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.machine.base import Prediction, apply_kernel, square
from ntkexp.machine.evidence import DoesNotApply, Evidence


def regression(kernel: Float[Tensor, "probe out train out_"], evidence: Evidence) -> Prediction:
    """The machine that reproduces what was learned at the training examples."""
    matrix = square(kernel)
    if kernel.shape[1] < kernel.shape[3]:
        raise DoesNotApply("the path was not read at every output: needs path.outputs=all")
    if matrix.isnan().all():
        raise DoesNotApply("the path was not read at the training examples: add train to path.probes")
    attributed = evidence.attributed[: evidence.train]
    if matrix.isnan().any() and not attributed.all():
        raise DoesNotApply(
            f"{int(attributed.sum())} of {evidence.train} training examples are attributed: raise path.attributed"
        )
    if not matrix.isfinite().all():
        raise DoesNotApply("the kernel among the training examples is not finite")
    U, singular, Vh = torch.linalg.svd(matrix)
    cutoff = len(matrix) * torch.finfo(matrix.dtype).eps
    kept = singular > cutoff * singular.max()
    inverse = torch.where(kept, 1 / singular, 0.0)
    coefficients = Vh.mH @ (inverse * (U.mH @ evidence.learned.flatten()))
    outputs = evidence.start + apply_kernel(kernel, coefficients.view(evidence.targets.shape))
    return Prediction(outputs, f"rank {int(kept.sum())}/{len(matrix)}, cut-off {cutoff:.0e}")
