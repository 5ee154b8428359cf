"""The store diagnostics.zarr: the arrays that diagnostics measured during a run.

    step     [snapshot]               the step; −1 until the snapshot is complete
    <name>   [snapshot, <name>_0, …]  an array of a diagnostic

A run has the store only if a diagnostic returns arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ntkexp.records.array_schema import read_store
from ntkexp.records.atomic import RUN_AGAIN, Damaged
from ntkexp.records.kernels import (
    create_snapshots,
)

DIAGNOSTICS = "diagnostics.zarr"
STEP = "step"

COLUMN = "diagnostics."
"""The prefix of the columns of metrics.csv that contain the numbers of diagnostics."""


def create_diagnostics(
    path: Path, shapes: Mapping[str, tuple[int, ...]], capacity: int
) -> None:
    """Create a store for arrays of these shapes at up to `capacity` steps. Keep
    existing chunks. If there are no arrays, do nothing."""
    if not shapes:
        return
    axes = {
        name: {f"{name}_{number}": length for number, length in enumerate(shape)}
        for name, shape in shapes.items()
    }
    create_snapshots(path, axes, capacity)


def refuse_odd_diagnostics(path: Path) -> None:
    """Raise if the store does not have the format that runs write."""
    arrays = read_store(path).arrays
    if STEP not in arrays:
        raise Damaged(
            f"{path} has content that no run writes: it has no '{STEP}'; {RUN_AGAIN}"
        )
    for name, array in arrays.items():
        if array.shape[:1] != arrays[STEP].shape:
            raise Damaged(
                f"{path} has content that no run writes: '{name}' and '{STEP}' have other lengths; "
                f"{RUN_AGAIN}"
            )
