"""Whether two tensors hold the same numbers, for which a device is not waited for where they are the same memory.

>>> x = torch.ones(2, 3)
>>> same(x, x.view(2, 3)), same(x, x.clone()), same(x, torch.zeros(2, 3)), same(x, x.t())
(True, True, False, False)
"""

from __future__ import annotations

import torch
from torch import Tensor


def same(one: Tensor, other: Tensor) -> bool:
    """What `torch.equal` says, but that a number of no value is the same as itself."""
    return is_same_memory(one, other) or torch.equal(one, other)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both look at the same place in the same way."""
    layout = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return layout and one.data_ptr() == other.data_ptr()
