"""Sums that lie on disk are kept in files beside the checkpoint that names them: sums-STEP-NUMBER.bin.

Every checkpoint has files of its own, which are there whole before it is, and those of the one before go when it is: a
kill at any moment leaves a checkpoint with all of its files.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.on_disk import RowsInFile, blocks, is_on_disk
from ntkexp.records.atomic import being_written
from ntkexp.records.seal import Sealing, Seals

FILES = "sums-*.bin"
KEPT = "kept in"
"""The key of what stands in a checkpoint for numbers of another file."""


def keep_sums(folder: Path, step: int, state: Any) -> tuple[Any, Seals]:
    """Write what of a state lies on disk, after so many steps; the state with names in its place, and their seals."""
    seals: dict[str, tuple[int, str]] = {}

    def kept(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and is_on_disk(leaf)):
            return leaf
        name = f"sums-{step}-{len(seals)}.bin"
        seals[name] = written(folder / name, leaf)
        return {KEPT: name, "shape": list(leaf.shape), "kind": leaf[:0].numpy().dtype.name}

    return tree_map(kept, state), seals


def written(path: Path, numbers: Tensor) -> tuple[int, str]:
    """Write numbers to a file, some rows at a time; the mark of the file."""
    sealing = Sealing()
    with being_written(path) as file:
        for block in blocks(numbers):
            content = block.contiguous().numpy().data
            file.write(content)
            sealing.take(content)
    return sealing.mark


def found_sums(folder: Path, state: Any) -> Any:
    """A state with what its names stand for, of which nothing is read yet."""

    def found(leaf: Any) -> Any:
        if not is_name(leaf):
            return leaf
        return RowsInFile(folder / leaf[KEPT], tuple(leaf["shape"]), np.dtype(leaf["kind"]))

    return tree_map(found, state, is_leaf=is_name)


def is_name(part: Any) -> bool:
    """Whether this stands for numbers of another file."""
    return isinstance(part, dict) and KEPT in part


def kept_bytes(folder: Path) -> int:
    """How much the sums of a checkpoint take."""
    return sum(path.stat().st_size for path in folder.glob(FILES))


def drop_sums(folder: Path, but: Collection[str] = ()) -> None:
    """Remove the sums of other checkpoints than that with these files."""
    for path in folder.glob(FILES):
        if path.name not in but:
            path.unlink()
