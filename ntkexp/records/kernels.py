"""kernels.zarr: tangent kernels along the run and the path kernels at its end.

    tangent          [snapshot, probe, out, train, out_]   one chunk per snapshot; or instead
    trace            [snapshot, probe, train]              its sum over out = out_
    output_gradient  [snapshot, train, out_]               ℓ′, the loss's, of all training examples
    step             [snapshot]                            its step, written last; −1 until then
    path_<rule>      [probe, out, train, out_]             NaN, of which nothing is kept, where it is not known

`probe` runs over every point where the network is read: first the training examples, then probe, then test.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from ntkexp.records.atomic import write_atomically
from ntkexp.records.store import create_store, drop_partial, get_array, open_store, preallocate

Kernel: TypeAlias = NDArray[np.float64]  # [probe, out, train, out_]

KERNELS = "kernels.zarr"
KERNEL_DIMS = ("probe", "out", "train", "out_")
TANGENT, TRACE = "tangent", "trace"
NOT_YET = -1
FEW = 16  # points in a chunk, where not all are known


def create_kernels(path: Path, points: int, outputs: int, train: int, room: int, *, traced: bool = False) -> None:
    """Create a store with room for so many tangent kernels, or their traces, and none written; those that are there
    stay.
    """
    described: dict[str, Buffer] = {}
    store = create_store(MemoryStore(described))
    kept = {TRACE: {"probe": points, "train": train}}
    if not traced:
        kept = {TANGENT: dict(zip(KERNEL_DIMS, (points, outputs, train, outputs), strict=True))}
    for name, sizes in (kept | {"output_gradient": {"train": train, "out_": outputs}}).items():
        place, shape = ("snapshot", *sizes), tuple(sizes.values())
        preallocate(store, name, (room, *shape), chunks=(1, *shape), dims=place, fill=np.float64("nan"))
    preallocate(store, "step", (room,), chunks=(1,), dims=("snapshot",), fill=np.int64(NOT_YET))
    for name, content in described.items():
        write_atomically(path / name, content.to_bytes())


def write_snapshot(path: Path, index: int, step: int, kernel: Kernel, output_gradient: NDArray[np.float64]) -> None:
    """Write the kernel first, its step last: a step that can be read has its whole kernel beside it."""
    store, found = open_store(path, write=True), np.asarray(kernel, dtype=np.float64)
    name = kept_name(path)
    get_array(store, name)[index] = found[:, 0, :, 0] if name == TRACE else found
    get_array(store, "output_gradient")[index] = np.asarray(output_gradient, dtype=np.float64)
    get_array(store, "step")[index] = step


def kept_name(path: Path) -> str:
    """What a store keeps of its tangent kernels."""
    return TRACE if (path / TRACE).exists() else TANGENT


def snapshot_places(path: Path, index: int) -> list[str]:
    """The file, and the folders of files, that hold one snapshot of a run folder."""
    return [f"{KERNELS}/{name}/c/{index}" for name in (kept_name(path / KERNELS), "output_gradient", "step")]


def write_path_kernel(path: Path, rule: str, kernel: Kernel, points: Sequence[int], outs: Sequence[int]) -> None:
    """Write the path kernel by a rule, known at these points and, along its axis `out`, at these of the outputs.

    Nothing is kept of other points and outputs, but for points that lie beside known ones: they are read as NaN.
    """
    count, _, train, outputs = kernel.shape
    chunks = (count if len(points) == count else FEW, outputs if len(outs) == outputs else 1, train, outputs)
    store, name = open_store(path, write=True), f"path_{rule}"
    preallocate(store, name, (count, outputs, train, outputs), chunks=chunks, dims=KERNEL_DIMS, fill=np.float64("nan"))
    known = np.asarray(kernel if len(points) == count else kernel[points], dtype=np.float64)
    get_array(store, name).oindex[np.array(points), np.array(outs)] = known


def finish_kernels(path: Path) -> int:
    """Give up the room for snapshots that were not reached; how many there are."""
    store = open_store(path, write=True)
    written = int(np.count_nonzero(read_steps(path) != NOT_YET))
    for name in (kept_name(path), "output_gradient", "step"):
        place = get_array(store, name)
        place.resize((written, *place.shape[1:]))
    drop_partial(path)
    return written


def read_steps(path: Path) -> NDArray[np.int64]:
    """The step of each snapshot, −1 where there is none."""
    return np.asarray(get_array(open_store(path), "step")[...], dtype=np.int64)


def read_snapshot(path: Path, index: int) -> Kernel:
    """Read the tangent kernel of one snapshot; its trace is one between all outputs taken as one."""
    name = kept_name(path)
    found = np.asarray(get_array(open_store(path), name)[index], dtype=np.float64)
    return found[:, None, :, None] if name == TRACE else found


def read_array(path: Path, name: str) -> NDArray[np.float64]:
    """Read a whole array of the store."""
    return np.asarray(get_array(open_store(path), name)[...], dtype=np.float64)
