"""The memory that a run may use where nobody says how much: a GPU's own, most of it, which is the same in each run.

What is free there would be another number each time, and with it the blocks in which points are read, and rounding.

>>> room_of("cpu")
4.0
"""

from __future__ import annotations

import torch

USUAL = 4.0  # GB
SHARE = 0.8  # of a GPU's memory: the rest is for torch itself, and what its allocator cannot use


def room_of(device: str) -> float:
    """GB on this device; of one that is not here, as much as on the processor."""
    if device == "cpu" or not torch.cuda.is_available():
        return USUAL
    _, whole = torch.cuda.mem_get_info(torch.device(device).index)  # none is that of the current device
    return SHARE * whole / 1e9
