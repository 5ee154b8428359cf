"""Numbers go out of torch: a module takes them out of tensors as lists or arrays, and may put them back as constants.

No operation tells of it, so an equation is written down in its place: these are the numbers that were read. A program
that was made of the tape holds as long as it does. `functionalize` cannot follow: its tensors have no memory to read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ntkexp.kernel.record.drawing import dropped

WAYS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)


class OutOfTorch(TorchFunctionMode):
    """Notes what leaves torch; refuses it where values are not in memory."""

    def __init__(self, in_memory: bool) -> None:
        super().__init__()
        self.in_memory = in_memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAYS:
            if not self.in_memory:
                raise RuntimeError("numbers leave torch")
            note(args[0])
        return dropped(func, args, kwargs or {})


def note(value: Tensor) -> None:
    """Ask torch whether a tensor has the elements that it has."""
    torch.equal(value, torch.tensor(value.tolist(), dtype=value.dtype, device=value.device).reshape(value.shape))
