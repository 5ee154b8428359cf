"""Limits of memory and disk space.

If a limit is too small, the error message states the available size, the required size
and a remedy. The required size is rounded up, so that it suffices as the new limit.

>>> memory = MemoryBudget.of_gb(4)
>>> memory.largest_batch(item_bytes=1.5e9), memory.holding(2e9).fits(3e9)
(2, False)
>>> memory.require(4.2e9, "these modes", "give fewer examples")
Traceback (most recent call last):
ntkexp.mistake.Mistake: memory_gb=4 is less than the 4.24 GB of these modes; raise it, or give fewer examples
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

from ntkexp.mistake import Mistake, NoPlace, checked_number

MAX_MEMORY_GB = 1e9
DEFAULT_MEMORY_GB = 4.0
# factor of a required size in a message. The size is then rounded to three digits,
# which changes it by at most 0.5 %, so the printed size always suffices.
ROUND_UP = 1.01


@dataclass(frozen=True)
class MemoryBudget:
    """The memory limit of a computation. `held`
    of the total `bytes` are already in use."""

    bytes: float
    held: float = 0.0

    @classmethod
    def of_gb(cls, memory_gb: float) -> MemoryBudget:
        """Return the budget for an argument `memory_gb`.
        Raise if it is not a positive number."""
        return cls(
            1e9 * checked_number("memory_gb", memory_gb, most=MAX_MEMORY_GB, above=True)
        )

    @property
    def free(self) -> float:
        return self.bytes - self.held

    def holding(self, taken: float) -> MemoryBudget:
        """Return a budget with `taken` more bytes in use."""
        return replace(self, held=self.held + taken)

    def part(self, parts: float) -> MemoryBudget:
        """Divide the free bytes into `parts` equal parts. Return the budget of one."""
        return MemoryBudget(self.free / parts)

    def fits(self, needed: float) -> bool:
        return needed <= self.free

    def largest_batch(self, item_bytes: float, most: int = sys.maxsize) -> int:
        """Return the number of items that fit into the free bytes, from 1 to `most`."""
        return max(1, min(most, int(self.free / item_bytes)))

    def refusal(self, needed: float, what: str, remedy: str = "") -> str:
        """Return the error message for `needed` more bytes that do not fit into memory.
        `what` names the data that need them, and `remedy` is advice."""
        needed_gb = ROUND_UP * (self.held + needed) / 1e9
        return (
            f"memory_gb={self.bytes / 1e9:g} is less than the {needed_gb:.3g} GB of {what}; "
            f"raise it{remedy and f', or {remedy}'}"
        )

    def require(self, needed: float, what: str, remedy: str = "") -> None:
        """Raise if `needed` more bytes do not fit into memory."""
        if not self.fits(needed):
            raise Mistake(self.refusal(needed, what, remedy))


DEFAULT_MEMORY = MemoryBudget.of_gb(DEFAULT_MEMORY_GB)


def require_disk(folder: Path, needed: float, what: str, remedy: str = "") -> None:
    """Raise if the disk of a folder has too little free space."""
    free = disk_usage(folder).free
    if free < needed:
        raise NoPlace(
            f"{what} take {needed / 1e9:.2g} GB of disk and {folder} has {free / 1e9:.2g} GB free; "
            f"{remedy and f'{remedy}, or '}choose another place"
        )


def split_range(start: int, stop: int, size: int) -> list[slice]:
    """Cut a range into consecutive slices of at most `size`.

    >>> split_range(0, 5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(k, min(k + size, stop)) for k in range(start, stop, max(1, size))]
