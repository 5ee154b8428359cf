"""Arrays on disk: zarr version 3, no compression, named dimensions; kernels.zarr and predictions.zarr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from ntkexp.mistake import Mistake
from ntkexp.records.array_schema import ZARR, Dims, read_store, refuse_odd_store
from ntkexp.records.atomic import AGAIN, Damaged, write_atomically
from ntkexp.records.own_files import drop_half_written, remove_store
from ntkexp.records.schema import PredictionsAttributes, checked

# --- Arrays on disk: zarr version 3, no compression, named dimensions, nothing that depends on the clock.
#
# A file per chunk makes a store readable whatever happens to the process that writes it, and the same bytes each
# time.


Facts: TypeAlias = Mapping[str, float | int | str | Sequence[str] | Sequence[int]]

LARGEST_CHUNK = 32_000_000
"""The bytes that a reader takes at once, whatever it looks for."""


def create_store(path: Path | MemoryStore, facts: Facts | None = None) -> zarr.Group:
    """An empty store in place of whatever was there."""
    if isinstance(path, Path):
        remove_store(path)
    return zarr.create_group(path, zarr_format=3, overwrite=True, attributes=dict(facts or {}))


def open_store(path: Path, *, write: bool = False) -> zarr.Group:
    try:
        return zarr.open_group(path, mode="r+" if write else "r", zarr_format=3)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"{path} is missing or damaged: it is not a store of arrays") from error


def get_array(
    store: zarr.Group, name: str
) -> zarr.Array[Any]:  # the type of its metadata is zarr's business
    array = store.get(name)
    if not isinstance(array, zarr.Array):
        raise Mistake(f"{store.store_path} is damaged: it holds no array '{name}'")
    return array


class ManyRows(Protocol):
    """An array, or something larger than the memory of which a few rows are looked at at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its length along every axis."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The kind of its numbers."""

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """Look at some rows."""


def write_array(
    store: zarr.Group,
    name: str,
    array: ManyRows,
    dims: Sequence[str],
    facts: Facts,
    *,
    kind: np.dtype[Any] | None = None,
) -> None:
    """Put one array as one chunk, or a large one in chunks of rows, in place of an older one of this name."""
    step = rows_at_once(array, dtype := kind or array.dtype)
    stored = store.create_array(
        name,
        shape=array.shape,
        chunks=tuple(max(1, length) for length in (step, *array.shape[1:])),
        dtype=dtype,
        compressors=None,
        dimension_names=list(dims),
        attributes=dict(facts),
        overwrite=True,
    )
    for start in range(0, array.shape[0], step):
        rows = slice(start, min(start + step, array.shape[0]))
        stored[rows] = array[rows]


def write_stacked(
    store: zarr.Group, name: str, arrays: Sequence[ManyRows], dims: Sequence[str]
) -> None:
    """Put arrays of one shape as one array of numbers in double precision, in chunks of rows of each."""
    count, *others = arrays[0].shape
    step = rows_at_once(arrays[0], np.dtype(np.float64))
    shape, chunks = (len(arrays), count, *others), (1, step, *others)
    preallocate(store, name, shape, chunks=chunks, dims=dims, fill=np.float64(0))
    stored = get_array(store, name)
    for number, array in enumerate(arrays):
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            stored[number, rows] = array[rows]


def rows_at_once(array: ManyRows, dtype: np.dtype[Any]) -> int:
    count, *others = array.shape
    return max(1, min(count, LARGEST_CHUNK // max(1, prod(others) * dtype.itemsize)))


def preallocate(
    store: zarr.Group,
    name: str,
    shape: Sequence[int],
    *,
    chunks: Sequence[int],
    dims: Sequence[str],
    fill: np.number[Any],
) -> None:
    """Make room for numbers of the kind of `fill`, which is read where nothing was written: no chunk is until then. An
    older array of this name is gone.
    """
    store.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(max(1, length) for length in chunks),
        dtype=fill.dtype,
        compressors=None,
        dimension_names=list(dims),
        fill_value=fill.item(),
        overwrite=True,
    )


# --- kernels.zarr: tangent kernels along the run and the path kernels at its end.
#
#     tangent          [snapshot, probe, out, train, out_]   one chunk per snapshot; or instead
#     trace            [snapshot, probe, train]              its sum over out = out_
#     output_gradient  [snapshot, train, out_]               ℓ′, the loss's, of all training examples
#     step             [snapshot]                            its step, written last; −1 until then
#     path_<rule>      [probe, out, train, out_]             NaN, of which nothing is kept, where it is not known
#
# `probe` runs over every point where the network is read: first the training examples, then probe, then test.


Kernel: TypeAlias = NDArray[np.float64]  # [probe, out, train, out_]

KERNELS = "kernels.zarr"
KERNEL_DIMS = ("probe", "out", "train", "out_")
TANGENT, TRACE = "tangent", "trace"
KERNEL_KINDS: Mapping[str, Dims] = {
    TANGENT: ("snapshot", *KERNEL_DIMS),
    TRACE: ("snapshot", "probe", "train"),
    "output_gradient": ("snapshot", "train", "out_"),
    "step": ("snapshot",),
    "path": KERNEL_DIMS,
}
"""The axes of each kind of array."""
NOT_YET = -1
FEW = 16  # points in a chunk, where not all are known


def create_kernels(
    path: Path, points: int, outputs: int, train: int, room: int, *, traced: bool = False
) -> None:
    """Create a store with `room` for tangent kernels, or their traces; kernels that it holds already stay."""
    described: dict[str, Buffer] = {}
    store = create_store(MemoryStore(described))
    kernel_sizes = {TRACE: {"probe": points, "train": train}}
    if not traced:
        kernel_sizes = {
            TANGENT: dict(zip(KERNEL_DIMS, (points, outputs, train, outputs), strict=True))
        }
    for name, sizes in (
        kernel_sizes | {"output_gradient": {"train": train, "out_": outputs}}
    ).items():
        dims, shape = ("snapshot", *sizes), tuple(sizes.values())
        preallocate(
            store, name, (room, *shape), chunks=(1, *shape), dims=dims, fill=np.float64("nan")
        )
    preallocate(store, "step", (room,), chunks=(1,), dims=("snapshot",), fill=np.int64(NOT_YET))
    for name, content in described.items():
        write_atomically(path / name, content.to_bytes())


def write_snapshot(
    path: Path, index: int, step: int, kernel: Kernel, output_gradient: NDArray[np.float64]
) -> None:
    """Write the kernel first, its step last: a step that can be read has its whole kernel beside it."""
    store, values = open_store(path, write=True), np.asarray(kernel, dtype=np.float64)
    name = tangent_array_name(path)
    get_array(store, name)[index] = values[:, 0, :, 0] if name == TRACE else values
    get_array(store, "output_gradient")[index] = np.asarray(output_gradient, dtype=np.float64)
    get_array(store, "step")[index] = step


def tangent_array_name(path: Path) -> str:
    """What a store keeps of its tangent kernels."""
    return TRACE if (path / TRACE).exists() else TANGENT


def snapshot_chunks(path: Path, index: int) -> list[str]:
    """The file, and the folders of files, that hold one snapshot of a run folder."""
    return [
        f"{KERNELS}/{name}/c/{index}"
        for name in (tangent_array_name(path / KERNELS), "output_gradient", "step")
    ]


def write_path_kernel(
    path: Path, rule: str, kernel: Kernel, points: Sequence[int], outs: Sequence[int]
) -> None:
    """Write the path kernel by a rule, known at these points and, along its axis `out`, at these of the outputs.

    Nothing is kept of other points and outputs, but for points that lie beside known ones: they are read as NaN.
    """
    count, _, train, outputs = kernel.shape
    chunks = (
        count if len(points) == count else FEW,
        outputs if len(outs) == outputs else 1,
        train,
        outputs,
    )
    store, name = open_store(path, write=True), f"path_{rule}"
    preallocate(
        store,
        name,
        (count, outputs, train, outputs),
        chunks=chunks,
        dims=KERNEL_DIMS,
        fill=np.float64("nan"),
    )
    values = np.asarray(kernel if len(points) == count else kernel[points], dtype=np.float64)
    get_array(store, name).oindex[np.array(points), np.array(outs)] = values


def finish_kernels(path: Path) -> int:
    """Give up the room for snapshots that were not reached; how many there are."""
    store = open_store(path, write=True)
    written = int(np.count_nonzero(read_steps(path) != NOT_YET))
    for name in (tangent_array_name(path), "output_gradient", "step"):
        array = get_array(store, name)
        array.resize((written, *array.shape[1:]))
    drop_half_written(path.rglob("*"))
    return written


def refuse_odd_kernels(path: Path, lengths: Mapping[str, int]) -> None:
    """Raise if the store holds what no run writes; its axes have these lengths."""
    store = read_store(path)
    snapshots = {"snapshot": store.arrays["step"].shape[0]} if "step" in store.arrays else {}
    refuse_odd_store(store, path, KERNEL_KINDS, ["step"], {**lengths, **snapshots})


def read_steps(path: Path) -> NDArray[np.int64]:
    """The step of each snapshot, −1 where there is none."""
    return np.asarray(get_array(open_store(path), "step")[...], dtype=np.int64)


def read_snapshot(path: Path, index: int) -> Kernel:
    """Read the tangent kernel of one snapshot; its trace is one between all outputs taken as one."""
    name = tangent_array_name(path)
    kernel = np.asarray(get_array(open_store(path), name)[index], dtype=np.float64)
    return kernel[:, None, :, None] if name == TRACE else kernel


# --- predictions.zarr: what the network and every kernel machine say at every point.
#
#     prediction  [machine, probe, out]   the machines' names are the attribute `machines`
#
# `f_0` and `f_T` are the network before and after training.


def write_predictions(path: Path, predictions: Mapping[str, NDArray[np.float64]]) -> None:
    """Write each machine's outputs [probe, out], in the order given."""
    stacked = np.stack([np.asarray(values, dtype=np.float64) for values in predictions.values()])
    store = create_store(path, {"machines": list(predictions)})
    write_array(store, "prediction", stacked, ("machine", "probe", "out"), {})


PREDICTION_KINDS: Mapping[str, Dims] = {"prediction": ("machine", "probe", "out")}


def refuse_odd_predictions(path: Path, lengths: Mapping[str, int]) -> int:
    """Raise if the store holds what no run writes; return the number of outputs."""
    store = read_store(path)
    names = checked(store.attributes, PredictionsAttributes, path / ZARR)["machines"]
    if len(set(names)) < len(names) or not {"f_0", "f_T"} <= set(names):
        raise Damaged(
            f"{path} holds what no run writes: its machines are {', '.join(names)}; {AGAIN}"
        )
    refuse_odd_store(
        store, path, PREDICTION_KINDS, ["prediction"], {**lengths, "machine": len(names)}
    )
    return store.arrays["prediction"].shape[2]


def read_predictions(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read each machine's outputs [probe, out], in the order written."""
    store = open_store(path)
    names = store.attrs["machines"]
    assert isinstance(names, list)
    return dict(zip(map(str, names), np.asarray(get_array(store, "prediction")[...]), strict=True))
