"""checkpoint.pt: where an unfinished run stands, and the seals of all files that the rest of it relies on.

What it holds of the run is said in `run.state`, and when one is written in `run.folder_listener`.

It is sealed for its run. Nothing is made of it before its own seal and theirs have been looked at: a run goes on to the
same bytes, or begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ntkexp.on_disk import is_on_disk, put_back
from ntkexp.records.folder import BEGUN, CONFIG, OVERRIDES, RunFolder
from ntkexp.records.seal import Damaged, Seals, being_sealed, broken, sealed_for
from ntkexp.text import several

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CHECKPOINT, TRAJECTORY, METRICS = "checkpoint.pt", "trajectory.bin", "metrics.csv"

LARGE = 2**20  # bytes that are written at once of a tensor

BEGINNING = (CONFIG, OVERRIDES, "data.npz")
"""What is written before the first step."""

Checkpoint: TypeAlias = Mapping[str, Any]
"""A state in plain tensors and numbers, with the seals."""


def save(folder: RunFolder, state: Checkpoint, of: str) -> None:
    """Keep a state; `seals` is part of it."""
    with being_sealed(folder.path / CHECKPOINT, of) as file:
        torch.save(dict(state), cast(BinaryIO, ReleasingFile(file, tuple(found_on_disk(state)))))


def found_on_disk(state: Checkpoint) -> Iterator[Tensor]:
    """The tensors of a state that lie on disk."""
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and is_on_disk(leaf))


@dataclass(frozen=True)
class ReleasingFile:
    """A file to which tensors on disk are copied, each of which is put back when it is written."""

    file: BinaryIO
    sources: tuple[Tensor, ...]

    def write(self, content: ReadableBuffer) -> int:
        """Write the next bytes."""
        written = self.file.write(content)
        if written >= LARGE:
            for source in self.sources:
                put_back(source)
        return written

    def flush(self) -> None:
        """Let nothing be kept back."""
        self.file.flush()


def load(folder: RunFolder, of: str) -> Checkpoint | None:
    """The state that was kept, if one was, with the folder taken back to it; or `Damaged`."""
    path = folder.path / CHECKPOINT
    if not path.is_file():
        return None
    refuse(folder, folder.broken(*BEGINNING) if sealed_for(path, of) else [CHECKPOINT])
    state: Checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    seals: Seals = state["seals"]
    cut(folder, seals[METRICS][0])
    refuse(folder, broken(folder.path, seals))
    folder.forget([CHECKPOINT, TRAJECTORY, BEGUN, *BEGINNING, *seals])
    return state


def refuse(folder: RunFolder, wrong: list[str]) -> None:
    """Refuse a folder whose files are not as they were written."""
    if wrong:
        raise Damaged(f"{folder.path} is damaged: {several(wrong)} not as it was written")


def cut(folder: RunFolder, size: int) -> None:
    """Forget the lines of metrics.csv that are behind this position: they are written again."""
    path = folder.path / METRICS
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
