"""Straight on: most modules write nothing in place and read no numbers, and are recorded as they run.

Any other needs help, and runs again: writes are rewritten, and what leaves torch is noted.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ntkexp.kernel.record.drawing import dropped
from ntkexp.kernel.record.out_of_torch import WAYS

READS = frozenset({*WAYS, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__})


class NotStraight(Exception):
    """The module is about to write into a tensor, or to read a number from one."""


class StraightOn(TorchFunctionMode):
    """Stops before a number is read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise NotStraight
        return dropped(func, args, kwargs or {})
