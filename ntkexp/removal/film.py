"""Two trainings on film, step by step: weights, and what the optimizer remembers.

Frame s of each run is [θ_s, memory after step s]. The film lies in a file that has no name: it takes room on the
disk, which is looked at first, and is gone when nobody looks at it any more, whatever ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.mistake import Mistake

WEIGHTS = "weights"


@dataclass(frozen=True)
class Film:
    """Room for so many frames; `parts` are in the order in which they lie."""

    parts: tuple[str, ...]
    frames: NDArray[Any]  # [frame, part, run, weight]
    device: torch.device

    def write(self, step: int, found: Mapping[str, Float[Tensor, "run weight"]]) -> None:
        """Keep what a step began with, and what came of it."""
        for part in self.parts:
            if part in found:
                self.frames[step, self.parts.index(part)] = found[part].detach().cpu().numpy()

    def read(self, step: int, part: str, run: int) -> Float[Tensor, " weight"]:
        """A part of a frame, of one of the runs."""
        return torch.from_numpy(np.array(self.frames[step, self.parts.index(part), run])).to(self.device)


def film_for(parts: tuple[str, ...], frames: int, like: Float[Tensor, " weight"], folder: Path) -> Film:
    """An empty film of two runs, in a file of this folder."""
    shape, kind = (frames, len(parts), 2, len(like)), like.cpu().numpy().dtype
    room, free = bytes_of(parts, frames, like), disk_usage(folder).free
    if free < room:
        raise Mistake(
            f"two recorded trainings take {room / 1e9:.2g} GB and {folder} has {free / 1e9:.2g} GB free; make room"
        )
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, room)
        return Film(parts, np.memmap(file, kind, "r+", shape=shape), like.device)


def bytes_of(parts: tuple[str, ...], frames: int, like: Float[Tensor, " weight"]) -> int:
    """How much room a film takes."""
    return frames * len(parts) * 2 * like.numel() * like.element_size()
