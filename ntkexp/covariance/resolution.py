"""Resolution: how large a variance may be where a kernel depends on small differences of variances and covariances.

Of erf, GELU and waves, nearly equal inputs give what q₁q₂ − c² or (q₁ + q₂)/2 − c says beside 1 + 2q, 1 + q or 1/b².
The difference is known up to the rounding of q or q² itself: b²q eps is the error of a kernel between near neighbours.

>>> resolved("Erf", torch.tensor([1e14], dtype=torch.float64))
Traceback (most recent call last):
ntkexp.mistake.Mistake: Erf: variance 1e+14 is too large for float64 to tell near neighbours apart; lower W_std, or ...
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.mistake import Mistake

LARGEST_ERROR = 1e-4


def resolved(layer: str, q: Float[Tensor, "..."], squared_frequency: float = 1.0) -> Float[Tensor, "..."]:
    """The variances at which a layer's kernel is known in their precision; others are refused."""
    largest = float(q.detach().max()) if q.numel() else 0.0
    if not squared_frequency * largest * torch.finfo(q.dtype).eps <= LARGEST_ERROR:
        kind = str(q.dtype).removeprefix("torch.")
        longer = "; or compute in float64" if q.dtype != torch.float64 else ""
        raise Mistake(
            f"{layer}: variance {largest:.3g} is too large for {kind} to tell near neighbours apart; "
            f"lower W_std, or scale the inputs down{longer}"
        )
    return q
