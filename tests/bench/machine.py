"""What this machine does at its best, measured in the run in which it is compared with: products and copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.bench.stopwatch import medians

SIZE = 1024  # of the matrices that are multiplied
COPIED = 4_000_000  # numbers that are copied: more than caches hold
QUICK = 64  # the size of both, where it is only asked whether all runs


@dataclass(frozen=True)
class Machine:
    """Rates of float64: operations (a multiplication and an addition are two) and bytes per second."""

    product: float  # seconds of a product of two square matrices
    operations: float
    bytes: float

    def floor(self, operations: float, numbers: float) -> float:
        """Seconds that nothing can beat that multiplies so often, and reads or writes so many numbers.

        >>> Machine(product=1.0, operations=100.0, bytes=80.0).floor(operations=200.0, numbers=30.0)
        3.0
        """
        return max(operations / self.operations, 8 * numbers / self.bytes)


def measure(*, quick: bool) -> Machine:
    """The machine with the threads that torch has now."""
    size, copied, times = (QUICK, QUICK, 1) if quick else (SIZE, COPIED, 9)
    square, long = (torch.randn(size, size, dtype=torch.float64), torch.randn(copied, dtype=torch.float64))
    into = torch.empty_like(long)
    found = medians({"product": lambda: torch.mm(square, square), "copy": lambda: into.copy_(long)}, times)
    return Machine(found["product"], 2 * size**3 / found["product"], 2 * 8 * copied / found["copy"])
