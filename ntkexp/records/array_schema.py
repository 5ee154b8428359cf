"""Validation of the arrays in a run folder. Shapes are checked before an array is read.

>>> store = Store({}, {"decay": ArrayRecord.model_validate(DESCRIBED)})
>>> kinds = {"decay": ("query", "out")}
>>> refuse_odd_store(store, Path("contributions.zarr"), kinds, ["decay"], {"query": 4})
>>> refuse_odd_store(store, Path("contributions.zarr"), kinds, ["decay"], {"query": 3})  # doctest: +ELLIPSIS
Traceback (most recent call last):
ntkexp.records.atomic.Damaged: contributions.zarr has content that no run writes: 'decay' has 4 along query, not 3; ...
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import RUN_AGAIN, Damaged, read_object
from ntkexp.records.schema import ArrayRecord, GroupRecord, checked, validated

# --- data.npz: the headers with types and shapes are read before the arrays.


class Header(NamedTuple):
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    kind: np.dtype[Any]


# kinds of NumPy dtypes
NUMBERS = "biuf"
INTEGER_KINDS = "iu"
TEXT_KINDS = "U"
ANY = NUMBERS + TEXT_KINDS


def read_headers(path: Path) -> dict[str, Header]:
    """Read the headers of all arrays in an npz file.
    Raise if an array is compressed or incomplete."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                entry.filename.removesuffix(".npy"): header_of(archive, entry)
                for entry in archive.infolist()
            }
    except (
        OSError,
        ValueError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as error:
        if isinstance(error, Mistake):
            raise
        raise Damaged(
            f"{path} is missing or damaged: it is not a file of arrays"
        ) from error


def header_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Header:
    """Read the header of one array. Raise ValueError if the array is compressed, or if
    the shape and dtype in the header do not match the number of bytes."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, kind = read(file)
        if (
            kind.kind not in ANY
            or prod(shape) * kind.itemsize != entry.file_size - file.tell()
        ):
            raise ValueError("an array is not what it says")
    return Header(shape, kind)


def refuse_half_characters(words: NDArray[Any]) -> None:
    """Raise ValueError if a text contains a code point
    that is not a Unicode character."""
    if not words.size or not words.dtype.itemsize:
        return
    codes = np.ascontiguousarray(words).view(np.uint32)
    if ((codes >= 0xD800) & (codes < 0xE000)).any() or (codes > 0x10FFFF).any():
        raise ValueError("a text holds a code that is no character")


@dataclass(frozen=True)
class RunAxes:
    """The lengths of a run's axes, according to data.npz.

    `points` is the number of points in all evaluated splits, and `splits` are the
    numbers of examples by split."""

    train: int
    points: int
    splits: Mapping[str, int]

    @classmethod
    def of(
        cls, headers: Mapping[str, Header], read: Sequence[str], path: Path
    ) -> RunAxes:
        """Return the lengths of the axes. `read` are the evaluated splits (the axis
        `query` of the stores).

        Raise if the arrays are inconsistent.
        """
        fault = data_fault(headers, read)
        if fault:
            raise Damaged(
                f"{path} has content that no run writes: {fault}; {RUN_AGAIN}"
            )
        counts = {
            split: headers[f"{split}_index"].shape[0] for split in ("train", *read)
        }
        return cls(counts["train"], sum(counts[split] for split in read), counts)

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of axes in stores, by the name of the axis."""
        return {"query": self.points, "train": self.train, "example": self.train}


def data_fault(headers: Mapping[str, Header], read: Sequence[str]) -> str | None:
    """Return a description of the first invalid array in data.npz, or None."""
    faults = list[str]()
    if not is_like(headers.get("classes"), 1, TEXT_KINDS):
        faults.append("'classes' is missing, or no names")
    for name, axes in (("out_name", 1), ("phases", 1), ("phase_classes", 2)):
        if name in headers and not is_like(headers[name], axes, TEXT_KINDS):
            faults.append(f"'{name}' are no names")
    for split in dict.fromkeys(("train", *read)):
        faults += split_faults(headers, split)
    return next(iter(faults), None)


def split_faults(headers: Mapping[str, Header], split: str) -> list[str]:
    """Return a description of each invalid array in one split."""
    index = headers.get(f"{split}_index")
    if index is None or not is_like(index, 1, INTEGER_KINDS):
        return [f"it has no '{split}_index', a number for each example"]
    split_headers = {
        name.removeprefix(f"{split}_"): header
        for name, header in headers.items()
        if name.startswith(f"{split}_")
    }
    faults = [
        f"'{split}_{part}' is not of {index.shape[0]} examples"
        for part, header in split_headers.items()
        if header.shape[:1] != index.shape
    ]
    kinds = {
        "shown": NUMBERS,
        "target": NUMBERS,
        "targets": NUMBERS,
        "name": TEXT_KINDS,
        "text": TEXT_KINDS,
        "phase": INTEGER_KINDS,
    }
    faults += [
        f"'{split}_{part}' is of another kind"
        for part, header in split_headers.items()
        if header.kind.kind not in kinds.get(part, ANY)
    ]
    required = ("shown", "name" if "name" in split_headers else "target")
    missing = [part for part in required if part not in split_headers]
    return faults + [f"it has no '{split}_{part}'" for part in missing]


def is_like(header: Header | None, axes: int, kinds: str) -> bool:
    return (
        header is not None and len(header.shape) == axes and header.kind.kind in kinds
    )


def refuse_odd_data(arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Raise if the number of a class or of a phase is out of range, if
    `phase_classes` has a wrong shape, or if a text is not valid Unicode."""
    classes = arrays["classes"]
    phases = arrays.get("phases", ())
    phase_classes = arrays.get("phase_classes")
    try:
        for array in arrays.values():
            if array.dtype.kind == TEXT_KINDS:
                refuse_half_characters(array)
        for split in ("train", "query", "test"):
            target = arrays.get(f"{split}_target")
            phase = arrays.get(f"{split}_phase")
            if target is not None and len(classes):
                refuse_outside(target, 0, len(classes), f"{split}_target")
            if phase is not None:
                refuse_outside(phase, 1, 1 + len(phases), f"{split}_phase")
        if phase_classes is not None and phase_classes.shape != (
            len(phases),
            len(classes),
        ):
            raise ValueError("'phase_classes' are not a row for each phase")
    except ValueError as error:
        raise Damaged(
            f"{path} has content that no run writes: {error}; {RUN_AGAIN}"
        ) from None


def refuse_outside(numbers: NDArray[Any], low: int, high: int, name: str) -> None:
    """Raise ValueError unless `numbers` are integers from `low` to `high` − 1."""
    if numbers.dtype.kind not in INTEGER_KINDS or (
        numbers.size and not low <= numbers.min() <= numbers.max() < high
    ):
        raise ValueError(f"'{name}' has numbers outside {low} to {high - 1}")


# --- Stores: the zarr.json files with types and shapes are read before the arrays.
#
# If a chunk has no file, zarr fills the chunk with the fill value. So a small store
# could describe an array that exceeds the memory. Therefore a minimum fraction of a
# large array must be stored.


DESCRIBED = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 1],
    "data_type": "float64",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 1]}},
    "codecs": [{"name": "bytes"}],
    "dimension_names": ["query", "out"],
}
"""An example of the zarr.json of an array, for doctests."""

MAX_UNSTORED_NUMBERS = 1 << 27  # an array up to this size may have no stored chunk
MIN_STORED_FRACTION = 1 / 16  # minimum fraction of stored numbers in a larger array
MAX_MISSING_CHUNKS = 1 << 16


class Store(NamedTuple):
    """The attributes of a zarr store, and the zarr.json of each array."""

    attributes: dict[str, Any]
    arrays: dict[str, ArrayRecord]


ZARR = "zarr.json"


def read_store(path: Path) -> Store:
    """Read the zarr.json of all arrays in a store.

    Raise if the store does not have the format that runs write.
    """
    group = checked(read_object(path / ZARR), GroupRecord, path / ZARR)
    arrays = dict[str, ArrayRecord]()
    for place in sorted(path.iterdir()):
        if place.is_dir():
            file = place / ZARR
            arrays[place.name] = validated(read_object(file), ArrayRecord, file)
            fault = array_fault(arrays[place.name], place)
            if fault:
                raise Damaged(f"{place} has content that no run writes: {fault}")
    return Store(group["attributes"], arrays)


def array_fault(array: ArrayRecord, path: Path) -> str | None:
    """Return a description of an error in the axes or the chunks of an array, or
    None."""
    chunk = array.chunk_grid.configuration.chunk_shape
    if not len(array.shape) == len(chunk) == len(array.dimension_names):
        return "its axes are not as many as their names"
    itemsize = np.dtype(array.data_type).itemsize
    stored_chunks = chunk_sizes(str(path / "c"))
    if any(size != prod(chunk) * itemsize for size in stored_chunks):
        return "a chunk has not the size of its numbers"
    chunks = prod(
        -(-length // step) for length, step in zip(array.shape, chunk, strict=True)
    )
    if chunks > MAX_MISSING_CHUNKS + len(stored_chunks):
        return f"it has {chunks} chunks, and {len(stored_chunks)} of them are there"
    numbers = prod(array.shape)
    stored = sum(stored_chunks) // itemsize
    may_be_sparse = path.name.startswith("path_") or numbers <= MAX_UNSTORED_NUMBERS
    if not may_be_sparse and stored < MIN_STORED_FRACTION * numbers:
        return f"it has {numbers} numbers, and {stored} of them are there"
    return None


def chunk_sizes(folder: str) -> list[int]:
    """Return the size of each stored chunk in bytes."""
    sizes = list[int]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    sizes += chunk_sizes(entry.path)
                elif not entry.name.startswith("."):
                    sizes.append(entry.stat().st_size)
    except (FileNotFoundError, NotADirectoryError):
        return sizes
    return sizes


Dims: TypeAlias = tuple[str, ...]


def refuse_odd_store(
    store: Store,
    path: Path,
    kinds: Mapping[str, Dims],
    required: Sequence[str],
    lengths: Mapping[str, int],
) -> None:
    """Raise if a store lacks a required array,
    or if an array has an unknown kind or a wrong shape.

    `kinds` are the axes of each kind of array, and `lengths` the known lengths of axes.
    The name of an array is its kind, or its kind with a suffix, as in
    `contribution_left`."""
    missing = [name for name in required if name not in store.arrays]
    if missing:
        raise Damaged(f"{path} holds no array '{missing[0]}'; {RUN_AGAIN}")
    for name, array in store.arrays.items():
        dims = tuple(array.dimension_names)
        possible_dims = [
            axes
            for kind, axes in kinds.items()
            if name == kind or name.startswith(f"{kind}_")
        ]
        if dims not in possible_dims:
            raise Damaged(
                f"{path} has content that no run writes: '{name}' over {', '.join(dims)}; {RUN_AGAIN}"
            )
        for axis, length in zip(dims, array.shape, strict=True):
            if axis in lengths and length != lengths[axis]:
                raise Damaged(
                    f"{path} has content that no run writes: '{name}' has {length} along {axis}, not "
                    f"{lengths[axis]}; {RUN_AGAIN}"
                )


# --- Steps.


def refuse_odd_steps(steps: NDArray[np.int64], path: Path) -> None:
    """Raise unless the steps are non-negative and strictly increasing."""
    if len(steps) and (steps[0] < 0 or (np.diff(steps) <= 0).any()):
        raise Damaged(f"{path} is damaged: its steps do not count upwards; {RUN_AGAIN}")
