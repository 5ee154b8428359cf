"""Memory that is refused before it is taken: what a configuration asks for may be beyond every machine.

New arrays are counted as torch is asked for them, by their shapes; the one that goes beyond the limit is not made.

>>> with MemoryLimit(1.0, "the data", "the number of examples"):  # doctest: +ELLIPSIS
...     numbers = torch.zeros(10**6, 10**6)
Traceback (most recent call last):
ntkexp.mistake.Mistake: memory_gb=1: the data takes an array of [1000000, 1000000], with which there are 4000 GB; ...
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.mistake import Mistake


class MemoryLimit(DispatchMode):
    """So much memory for the new arrays of something, in GB, of which so many copies will be held in the end; `remedy`
    says what makes it smaller."""

    def __init__(self, memory_gb: float, what: str, remedy: str, copies: float = 1.0) -> None:
        super().__init__()
        self.memory_gb, self.what, self.remedy, self.copies, self.taken = memory_gb, what, remedy, copies, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if (size := asked(func, args)) is not None:
            self.take(size, given.get("dtype") or torch.get_default_dtype())
        return func(*args, **given)

    def take(self, size: list[int], kind: torch.dtype) -> None:
        """Count an array, or refuse it."""
        self.taken += self.copies * prod(size) * kind.itemsize
        if self.taken > self.memory_gb * 1e9:
            held = "" if self.copies == 1 else " in all copies that are held"
            raise Mistake(
                f"memory_gb={self.memory_gb:g}: {self.what} takes an array of {size}, with which there are "
                f"{self.taken / 1e9:.4g} GB{held}; lower {self.remedy}, or raise memory_gb"
            )


def asked(operation: Any, arguments: tuple[Any, ...]) -> list[int] | None:
    """The shape of the array that an operation makes of nothing; the others make theirs of what was counted."""
    names = [argument.name for argument in operation._schema.arguments]
    if "device" not in names or any(isinstance(value, torch.Tensor) for value in arguments):
        return None
    given = dict(zip(names, arguments, strict=False))
    if "size" in given:
        return list(given["size"])
    count = given.get("n", given.get("end"))  # of randperm and arange
    return None if count is None else [max(0, int(count))]
