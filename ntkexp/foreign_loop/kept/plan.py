"""How often weights are kept on disk: after every few steps, and more seldom when that takes more than its share.

Whenever the share is used up, every second of the kept is dropped, and so the trace of a loop of any length fits.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE, MOST = 0.25, 50e9  # of what is free on the disk, and in bytes
FIRST = 8  # steps: to seal and write all weights costs more time than a small step of training
IN_MEMORY = 3  # copies of the weights that a replayed step takes: itself, its gradient, scales of elements


@dataclass
class KeepingPlan:
    """Weights are kept after `every` steps, each time `size` bytes; `most` is the largest such number that memory is
    enough for when the steps between are replayed."""

    every: int
    fixed: bool
    most: int
    size: float
    share: float

    @classmethod
    def of(cls, every: int | None, weights: float, size: float, free: float, memory_gb: float) -> KeepingPlan:
        """The plan for weights of so many bytes, which take `size` with what is kept beside them.

        >>> KeepingPlan.of(None, 1e6, 3e6, free=1e9, memory_gb=0.03).most
        10
        """
        most = int(1e9 * memory_gb / (IN_MEMORY * weights)) if weights else 1
        return cls(every or max(1, min(FIRST, most)), every is not None, most, size, min(SHARE * free, MOST))

    def due(self, since: int) -> bool:
        """Whether weights are to be kept, so many steps after the last."""
        return since >= self.every

    def too_many(self, kept: int) -> bool:
        """Whether every second one is to be dropped, of so many."""
        return not self.fixed and 2 * self.every <= self.most and kept > 2 and kept * self.size > self.share
