"""Memory: whether an exception says that none is left, and a limit that refuses an array before it is made.

Several ways lead to a kernel, and where torch cannot go one it goes another. A lack of memory is no such reason: which
numbers come out must not depend on how much of it other programs take.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.mistake import Mistake

SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python's or of torch's reports a lack of memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), is_out_of_memory(MemoryError())
    (True, True)
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS))


class MemoryLimit(DispatchMode):
    """A limit in GB on the new arrays of `what`, of which `copies` will be held in the end; `remedy` names the setting
    that makes it smaller. New arrays are counted by their shapes, before torch makes them.

    >>> with MemoryLimit(1.0, "the data", "the number of examples"):  # doctest: +ELLIPSIS
    ...     numbers = torch.zeros(10**6, 10**6)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: memory_gb=1: the data takes an array of [1000000, 1000000], with which there are 4000 GB...
    """

    def __init__(self, memory_gb: float, what: str, remedy: str, copies: float = 1.0) -> None:
        super().__init__()
        self.memory_gb, self.what, self.remedy, self.copies, self.taken = memory_gb, what, remedy, copies, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if (size := new_shape(func, args)) is not None:
            kind = named.get("dtype") or torch.get_default_dtype()
            self.taken += self.copies * prod(size) * kind.itemsize
            if self.taken > self.memory_gb * 1e9:
                held = "" if self.copies == 1 else " in all copies that are held"
                raise Mistake(
                    f"memory_gb={self.memory_gb:g}: {self.what} takes an array of {size}, with which there are "
                    f"{self.taken / 1e9:.4g} GB{held}; lower {self.remedy}, or raise memory_gb"
                )
        return func(*args, **named)


def new_shape(operation: Any, arguments: tuple[Any, ...]) -> list[int] | None:
    """The shape of an array that is made from no other; arrays made from others follow those that were counted."""
    names = [argument.name for argument in operation._schema.arguments]
    if "device" not in names or any(isinstance(value, torch.Tensor) for value in arguments):
        return None
    values = dict(zip(names, arguments, strict=False))
    if "size" in values:
        return list(values["size"])
    count = values.get("n", values.get("end"))  # of randperm and arange
    return None if count is None else [max(0, int(count))]
