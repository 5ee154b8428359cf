"""Arrays in zarr stores, and the stores kernels.zarr and predictions.zarr."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from ntkexp.capacity import split_range
from ntkexp.mistake import Mistake
from ntkexp.records.array_schema import ZARR, Dims, read_store, refuse_odd_store
from ntkexp.records.atomic import RUN_AGAIN, Damaged, write_atomically
from ntkexp.records.own_files import drop_half_written, remove_store
from ntkexp.records.schema import PredictionsAttributes, checked

# --- Arrays on disk: zarr version 3, without compression and dates, with named axes.
#
# Each chunk is a file. A store is readable even if its writer was killed. Equal arrays
# have equal bytes.


Fact: TypeAlias = (
    float | int | str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
)
Facts: TypeAlias = Mapping[str, Fact]

LARGEST_CHUNK = 32_000_000  # bytes; zarr always reads whole chunks


def create_store(path: Path | MemoryStore, facts: Facts | None = None) -> zarr.Group:
    """Create an empty store with the attributes `facts`.
    Replace a store at this path."""
    if isinstance(path, Path):
        remove_store(path)
    return zarr.create_group(
        path, zarr_format=3, overwrite=True, attributes=dict(facts or {})
    )


def open_store(path: Path, *, write: bool = False) -> zarr.Group:
    try:
        return zarr.open_group(path, mode="r+" if write else "r", zarr_format=3)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(
            f"{path} is missing or damaged: it is not a store of arrays"
        ) from error


def get_array(store: zarr.Group, name: str) -> zarr.Array[Any]:
    array = store.get(name)
    if not isinstance(array, zarr.Array):
        raise Mistake(f"{store.store_path} is damaged: it holds no array '{name}'")
    return array


class ManyRows(Protocol):
    """An array that may exceed the memory, and is read in blocks of rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers."""

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """Read some rows."""


def write_array(
    store: zarr.Group,
    name: str,
    array: ManyRows,
    dims: Sequence[str],
    facts: Facts,
    *,
    kind: np.dtype[Any] | None = None,
) -> None:
    """Write an array with the attributes `facts` as one chunk, or in chunks of rows if
    it is large.

    Replace an array of the same name. `dims` are the names of the axes, and `kind` is
    the dtype on disk (default: the dtype of the array).
    """
    dtype = kind or array.dtype
    step = rows_at_once(array, dtype)
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
    for rows in split_range(0, array.shape[0], step):
        stored[rows] = array[rows]


def write_stacked(
    store: zarr.Group, name: str, arrays: Sequence[ManyRows], dims: Sequence[str]
) -> None:
    """Write arrays of equal shape, stacked along a new first axis,
    as one float64 array."""
    count, *others = arrays[0].shape
    step = rows_at_once(arrays[0], np.dtype(np.float64))
    shape = (len(arrays), count, *others)
    chunks = (1, step, *others)
    preallocate(store, name, shape, chunks=chunks, dims=dims, fill=np.float64(0))
    stored = get_array(store, name)
    for number, array in enumerate(arrays):
        for rows in split_range(0, count, step):
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
    """Create an array that is filled with `fill`. Its chunks are written later.

    Replace an array of the same name.
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
#     tangent          [snapshot, query, out, train, out_]   tangent kernels, one chunk per snapshot
#     trace            [snapshot, query, train]              Σ_c K[x, c, x′, c], replaces `tangent`
#     output_gradient  [snapshot, train, out_]               ℓ′ of all training examples
#     step             [snapshot]                            the step; −1 until complete
#     path_<rule>      [query, out, train, out_]             path kernels; NaN where not integrated
#
# The axis `query` contains all points at which the network is evaluated: the splits
# train, query and test, in this order.


Kernel: TypeAlias = NDArray[np.float64]  # [query, out, train, out_]

KERNELS = "kernels.zarr"
KERNEL_DIMS = ("query", "out", "train", "out_")
TANGENT, TRACE = "tangent", "trace"
KERNEL_KINDS: Mapping[str, Dims] = {
    TANGENT: ("snapshot", *KERNEL_DIMS),
    TRACE: ("snapshot", "query", "train"),
    "output_gradient": ("snapshot", "train", "out_"),
    "step": ("snapshot",),
    "path": KERNEL_DIMS,
}
"""The axes of each kind of array."""
NOT_YET = -1  # the step of a snapshot that is not written yet
# points per chunk of a path kernel, if not all points are integrated
SPARSE_CHUNK_POINTS = 16


def create_kernels(
    path: Path,
    points: int,
    outputs: int,
    train: int,
    capacity: int,
    *,
    traced: bool = False,
) -> None:
    """Create a store for up to `capacity` tangent kernels, or their traces.

    Snapshots that the store already contains are kept.
    """
    kernel_sizes = {TRACE: {"query": points, "train": train}}
    if not traced:
        kernel_sizes = {
            TANGENT: dict(
                zip(KERNEL_DIMS, (points, outputs, train, outputs), strict=True)
            )
        }
    all_sizes = kernel_sizes | {"output_gradient": {"train": train, "out_": outputs}}
    create_snapshots(path, all_sizes, capacity)


def create_snapshots(
    path: Path,
    arrays: Mapping[str, Mapping[str, int]],
    capacity: int,
    facts: Facts | None = None,
) -> None:
    """Create a store with one array for each entry of `arrays`, for up to `capacity`
    snapshots.

    The first axis of each array is the snapshot. An entry of `arrays` contains the
    lengths of the other axes, by name. `facts` are the attributes of the store. Chunks
    that the store already contains are kept."""
    described: dict[str, Buffer] = {}
    store = create_store(MemoryStore(described), facts)
    for name, sizes in arrays.items():
        shape = tuple(sizes.values())
        preallocate(
            store,
            name,
            (capacity, *shape),
            chunks=(1, *shape),
            dims=("snapshot", *sizes),
            fill=np.float64("nan"),
        )
    preallocate(
        store,
        "step",
        (capacity,),
        chunks=(1,),
        dims=("snapshot",),
        fill=np.int64(NOT_YET),
    )
    for name, content in described.items():
        write_atomically(path / name, content.to_bytes())


def write_snapshot(
    path: Path,
    index: int,
    step: int,
    kernel: Kernel,
    output_gradient: NDArray[np.float64],
) -> list[str]:
    """Write one snapshot. Return the names of the written chunks."""
    name = tangent_array_name(path)
    if name == TRACE:
        kernel = kernel[:, 0, :, 0]
    arrays = {name: kernel, "output_gradient": output_gradient}
    return write_arrays(path, index, step, arrays)


def write_arrays(
    path: Path, index: int, step: int, arrays: Mapping[str, NDArray[Any]]
) -> list[str]:
    """Write the arrays of one snapshot to a store of `create_snapshots`. Return the
    names of the written chunks.

    The array `step` is written last. So a snapshot whose step is not −1 is complete."""
    store = open_store(path, write=True)
    for name, values in arrays.items():
        get_array(store, name)[index] = values
    get_array(store, "step")[index] = step
    return [f"{name}/c/{index}" for name in (*arrays, "step")]


def finish_arrays(path: Path) -> None:
    """Shrink all arrays of a store to the snapshots that were written. If there is no
    store, do nothing."""
    if path.exists():
        finish_snapshots(path, open_store(path).array_keys())


def tangent_array_name(path: Path) -> str:
    """Return the name of the array that holds tangent kernels or their traces."""
    return TRACE if (path / TRACE).exists() else TANGENT


def write_path_kernel(
    path: Path, rule: str, kernel: Kernel, points: Sequence[int], outs: Sequence[int]
) -> None:
    """Write the path kernel of a quadrature rule at some points
    and outputs (axis `out`).

    All other entries are NaN. Chunks that contain only NaN are not stored.
    """
    count, _, train, outputs = kernel.shape
    all_points = len(points) == count
    chunk_points = count if all_points else SPARSE_CHUNK_POINTS
    chunk_outs = outputs if len(outs) == outputs else 1
    store = open_store(path, write=True)
    name = f"path_{rule}"
    preallocate(
        store,
        name,
        (count, outputs, train, outputs),
        chunks=(chunk_points, chunk_outs, train, outputs),
        dims=KERNEL_DIMS,
        fill=np.float64("nan"),
    )
    values = kernel if all_points else kernel[points]
    get_array(store, name).oindex[np.array(points), np.array(outs)] = values


def finish_kernels(path: Path) -> int:
    """Shrink the arrays to the snapshots that were written.
    Return the number of snapshots."""
    return finish_snapshots(path, (tangent_array_name(path), "output_gradient", "step"))


def finish_snapshots(path: Path, names: Iterable[str]) -> int:
    """Shrink the named arrays of a store of `create_snapshots` to the snapshots that
    were written. Return the number of snapshots."""
    store = open_store(path, write=True)
    written = int(np.count_nonzero(read_steps(path) != NOT_YET))
    for name in names:
        array = get_array(store, name)
        array.resize((written, *array.shape[1:]))
    drop_half_written(path.rglob("*"))
    return written


def refuse_odd_kernels(path: Path, lengths: Mapping[str, int]) -> None:
    """Raise if the kernel store does not have the format that runs write, or if its
    axes do not have these lengths."""
    store = read_store(path)
    snapshots = (
        {"snapshot": store.arrays["step"].shape[0]} if "step" in store.arrays else {}
    )
    refuse_odd_store(store, path, KERNEL_KINDS, ["step"], {**lengths, **snapshots})


def read_steps(path: Path) -> NDArray[np.int64]:
    """Return the step of each snapshot, or −1 if the snapshot was not written."""
    return np.asarray(get_array(open_store(path), "step")[...], dtype=np.int64)


# --- predictions.zarr: the outputs of the network and of each kernel machine
# at all points.
#
#     prediction  [machine, query, out]   the outputs
#
# The attribute `machines` contains the names of the kernel machines. The names `f_0`
# and `f_T` denote the network before and after training.


def write_predictions(
    path: Path, predictions: Mapping[str, NDArray[np.float64]]
) -> None:
    """Write the outputs [query, out] of each kernel machine."""
    stacked = np.stack([*predictions.values()], dtype=np.float64)
    store = create_store(path, {"machines": list(predictions)})
    write_array(store, "prediction", stacked, ("machine", "query", "out"), {})


PREDICTION_KINDS: Mapping[str, Dims] = {"prediction": ("machine", "query", "out")}


def refuse_odd_predictions(path: Path, lengths: Mapping[str, int]) -> int:
    """Return the number of outputs. Raise if the store does not have the format that
    runs write."""
    store = read_store(path)
    names = checked(store.attributes, PredictionsAttributes, path / ZARR)["machines"]
    if len(set(names)) < len(names) or not {"f_0", "f_T"} <= set(names):
        raise Damaged(
            f"{path} has content that no run writes: its machines are {', '.join(names)}; {RUN_AGAIN}"
        )
    refuse_odd_store(
        store,
        path,
        PREDICTION_KINDS,
        ["prediction"],
        {**lengths, "machine": len(names)},
    )
    return store.arrays["prediction"].shape[2]


def read_predictions(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read the outputs [query, out] of each kernel machine,
    in the order of the file."""
    store = open_store(path)
    names = store.attrs["machines"]
    assert isinstance(names, list)
    return dict(
        zip(
            map(str, names),
            np.asarray(get_array(store, "prediction")[...]),
            strict=True,
        )
    )
