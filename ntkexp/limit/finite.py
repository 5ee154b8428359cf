"""What goes out is finite: kernels of which an entry is not are refused."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ntkexp.limit.network import Kernels
from ntkexp.mistake import Mistake


def finite(kernels: Kernels) -> Kernels:
    """The same kernels, if all entries are finite."""
    for name, values in zip(("NNGP", "tangent"), kernels, strict=True):
        if not is_finite(values):
            kind = str(values.dtype).removeprefix("torch.")
            raise Mistake(f"the {name} kernel has entries beyond {kind}; lower W_std, or scale the inputs down")
    return kernels


def is_finite(values: Float[Tensor, "..."]) -> bool:
    """Whether all entries are; a sum is quick, and not finite if one of them is not.

    >>> import torch
    >>> is_finite(torch.tensor([1e308, 1e308], dtype=torch.float64)), is_finite(torch.tensor([torch.inf, -torch.inf]))
    (True, False)
    """
    return bool(values.detach().sum().isfinite()) or bool(values.isfinite().all())
