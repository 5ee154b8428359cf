"""Batch norm of a single example, of which torch finds wrong gradients on CPUs.

What comes back to it may lie with its channels last in memory, as from x.flatten(2).transpose(1, 2). Of one image torch
2.13 then takes numbers of one channel for those of another; of several it does not, nor where they lie in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BATCH_NORMS = (torch.batch_norm, functional.batch_norm)


class InOrder(TorchFunctionMode):
    """Gradients come back in order to the batch norm of one example.

    >>> x = torch.zeros(1, 2, 2, 2, requires_grad=True)
    >>> with InOrder():
    ...     y = functional.batch_norm(x, torch.zeros(2), torch.tensor([1.0, 4.0]), eps=0.0)
    >>> turned = torch.arange(0.0, 16.0, 2.0).view(4, 2).t().view(1, 2, 2, 2)
    >>> torch.autograd.grad(y, x, turned)[0].flatten().tolist()
    [0.0, 4.0, 8.0, 12.0, 1.0, 3.0, 5.0, 7.0]
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return in_order(found) if func in BATCH_NORMS and len(found) == 1 else found


def in_order(value: Tensor) -> Tensor:
    """The same, but that no gradient comes back to it in another order in memory than that of its axes."""
    return value.flatten().view(value.shape)
