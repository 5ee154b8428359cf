"""Data sets of labelled images, and readers for the files of MNIST (IDX)
and CIFAR-10."""

from __future__ import annotations

import gzip
import os
import pickle
import zlib
from abc import abstractmethod
from collections.abc import Callable
from io import BytesIO
from math import prod
from pathlib import Path
from struct import unpack
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Integer, UInt8
from torch import Tensor

from ntkexp.component import CountOrNone
from ntkexp.data.base import (
    AbstractSource,
    Examples,
    Standardise,
    UserPath,
    expand_home,
    is_there,
    quoted,
    read_contents,
)
from ntkexp.data.table import read_bundled
from ntkexp.mistake import Mistake, NoData

# --- IDX, the format of MNIST: an array of bytes, optionally gzipped
#
#     two zero bytes, the type in one byte, the number of axes in one byte
#     one big-endian 32-bit length per axis
#     the data, last axis fastest
#
# The package cuts all splits from the training files (60,000 images). It never reads
# the official test files.


IMAGES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")
LABELS = ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte")
BYTE = 0x08


def find_idx_files(folder: Path, advice: str) -> tuple[Path, Path]:
    """Return the paths of the training images and their labels."""
    return find_idx_file(folder, IMAGES, advice), find_idx_file(folder, LABELS, advice)


def find_idx_file(folder: Path, names: tuple[str, ...], advice: str) -> Path:
    for name in (*names, *(f"{name}.gz" for name in names)):
        if is_there(folder / name):
            return folder / name
    raise NoData(
        f"{quoted(folder)} is not a folder with {names[0]} or {names[0]}.gz; {advice}"
    )


def read_idx_pictures(
    images: Path, labels: Path
) -> tuple[UInt8[Tensor, "example 1 row column"], UInt8[Tensor, " example"]]:
    pictures = read_idx(images, axes=3)
    classes = read_idx(labels, axes=1)
    if len(pictures) != len(classes):
        raise Mistake(
            f"{quoted(images)} holds {len(pictures)} images, and {labels.name} {len(classes)} "
            "labels"
        )
    return pictures[:, None], classes


def read_idx(path: Path, axes: int) -> UInt8[Tensor, "..."]:
    """Read an IDX array of bytes, which may be gzipped.

    Raise unless the file has `axes` axes and its size matches the header.
    """
    raw = read_contents(path)
    try:
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, OSError, zlib.error) as error:
        raise Mistake(
            f"{quoted(path)} is cut short or damaged: it cannot be unzipped"
        ) from error
    header_size = 4 + 4 * axes
    if len(raw) < header_size or raw[:2] != b"\0\0":
        raise Mistake(
            f"{quoted(path)} is not an IDX file: it begins with {raw[:4].hex(' ') or 'nothing'}"
        )
    if raw[2] != BYTE or raw[3] != axes:
        raise Mistake(
            f"{quoted(path)} holds IDX type {raw[2]:#04x} with {raw[3]} axes, where bytes "
            f"({BYTE:#04x}) with {axes} axes are expected"
        )
    shape = unpack(f">{axes}I", raw[4:header_size])
    body = raw[header_size:]
    if len(body) != prod(shape) or not body:
        raise Mistake(
            f"{quoted(path)} is cut short or damaged: {prod(shape)} bytes announced, "
            f"{len(body)} found"
        )
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape(shape)


# --- CIFAR-10, in both published versions
#
#     binary    data_batch_1.bin …   records of a label and 3072 = 3 · 32 · 32 bytes
#     python    data_batch_1 …       a pickle of {b"data": bytes [n, 3072], b"labels": list of n}
#
# The package reads all training batches in the folder,
# and never the official test batch.


CIFAR10_PIXELS = 3 * 32 * 32
CIFAR10_ADVICE = (
    "unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz of "
    "www.cs.toronto.edu/~kriz/cifar.html and name the folder that holds the batches"
)


def find_batches(folder: Path) -> tuple[Path, ...]:
    """Return the training batches in a folder. Prefer binary files to pickles."""
    for suffix in (".bin", ""):
        candidates = [folder / f"data_batch_{k}{suffix}" for k in range(1, 6)]
        paths = tuple(path for path in candidates if is_there(path))
        if paths:
            return paths
    raise NoData(
        f"{quoted(folder)} is not a folder with data_batch_1 or data_batch_1.bin; {CIFAR10_ADVICE}"
    )


def read_batches(
    paths: tuple[Path, ...],
) -> tuple[UInt8[Tensor, "example 3 32 32"], UInt8[Tensor, " example"]]:
    """Read the images and labels of all batches."""
    records = torch.from_numpy(np.concatenate([read_records(path) for path in paths]))
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_records(path: Path) -> UInt8[np.ndarray, "example 1+3*32*32"]:
    """Return the records of a batch, each a label followed by the bytes
    of the image."""
    raw = read_contents(path)
    if path.suffix != ".bin":
        return read_pickled_records(path, raw)
    if not raw or len(raw) % (1 + CIFAR10_PIXELS):
        raise Mistake(
            f"{quoted(path)} is cut short or damaged: {len(raw)} bytes are not whole records "
            f"of {1 + CIFAR10_PIXELS}"
        )
    return np.frombuffer(raw, np.uint8).reshape(-1, 1 + CIFAR10_PIXELS)


def read_pickled_records(
    path: Path, raw: bytes
) -> UInt8[np.ndarray, "example 1+3*32*32"]:
    try:
        batch: Any = unpickle_plain(raw)
        parts = {}
        for key, part in batch.items():  # keys are text if Python 3 wrote the file
            parts[key.encode() if isinstance(key, str) else key] = part
        match parts:
            case {b"data": Array(values=pixels), b"labels": [*labels]}:
                if labels and pixels.shape == (len(labels), CIFAR10_PIXELS):
                    return np.column_stack([np.array(labels, np.uint8), pixels])
        raise ValueError("no images with labels")
    except Forbidden as error:
        raise Mistake(
            f"{quoted(path)} is not a CIFAR-10 batch: it asks for {str(error)!r}, not for an array"
        ) from error
    except Exception as error:  # a damaged pickle can make its reader raise anything
        raise Mistake(
            f"{quoted(path)} is cut short or damaged: it is not a CIFAR-10 batch"
        ) from error


# --- Pickles of plain values and arrays of bytes
#
# Loading a pickle can run code. The unpickler below replaces the few functions that an
# array of bytes needs by harmless stand-ins, and refuses all other names. A file can
# therefore run no code.
#
#     numpy.core.multiarray._reconstruct(numpy.ndarray, (0,), 'b') ← (version, shape, dtype, column order, bytes)
#     numpy._core.numeric._frombuffer(bytes, dtype, shape, order)     since protocol 5
#     _codecs.encode(text, 'latin1')                                  bytes, before protocol 3


class Forbidden(pickle.UnpicklingError):
    """Raised if a pickle names a class or function that byte arrays do not need."""


class Type:
    """A stand-in for numpy.dtype that stores the name of the type."""

    def __init__(self, name: bytes | str, *flags: int) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order and the alignment, which do not matter for bytes."""


class Array:
    """A stand-in for numpy.ndarray whose elements are bytes."""

    def __init__(self, *empty: object) -> None:
        self.values: UInt8[np.ndarray, "..."] = np.empty(0, np.uint8)

    def __setstate__(
        self, state: tuple[int, tuple[int, ...], Type, bool, bytes]
    ) -> None:
        _, shape, kind, column_order, raw = state
        if kind.name != "u1":
            raise ValueError(f"an array of {kind.name}, not of bytes")
        order: Literal["C", "F"] = "F" if column_order else "C"
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order=order)


def from_buffer(raw: bytes, kind: Type, shape: tuple[int, ...], order: str) -> Array:
    """Return an `Array` with the bytes `raw`. This function replaces numpy's private
    `_frombuffer`, which pickled arrays call."""
    array = Array()
    array.__setstate__((1, shape, kind, order == "F", raw))
    return array


def encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise Forbidden(f"_codecs.encode to {encoding}")
    return text.encode("latin1")


STAND_INS: dict[str, Callable[..., object]] = {
    "numpy.dtype": Type,
    "numpy.ndarray": Array,
    "numpy.core.multiarray._reconstruct": Array,
    "numpy._core.multiarray._reconstruct": Array,
    "numpy.core.numeric._frombuffer": from_buffer,
    "numpy._core.numeric._frombuffer": from_buffer,
    "_codecs.encode": encode_latin1,
}


class Restricted(pickle.Unpickler):
    """An unpickler that refuses all names except those in STAND_INS."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if f"{module}.{name}" not in STAND_INS:
            raise Forbidden(f"{module}.{name}")
        return STAND_INS[f"{module}.{name}"]


def unpickle_plain(raw: bytes) -> object:
    """Load a pickle of plain values and byte arrays. Strings of Python 2 become bytes.

    >>> unpickle_plain(pickle.dumps({"labels": [1, 2]}))
    {'labels': [1, 2]}
    >>> unpickle_plain(pickle.dumps(print))
    Traceback (most recent call last):
    ntkexp.data.images.Forbidden: builtins.print
    """
    return Restricted(BytesIO(raw), encoding="bytes").load()


# --- Sets of labelled images
#
# Classes have the order in which the configuration lists them. If there are two, the
# second is the positive class.


Pictures = tuple[
    UInt8[Tensor, "example channel row column"], Integer[Tensor, " example"]
]


class AbstractImages(AbstractSource):
    """A data set of images with values from 0 to `white`, and a name for each label."""

    names: ClassVar[tuple[str, ...]]
    white: ClassVar[float] = 255.0
    standardise: Standardise = "all"
    classes: tuple[int, ...] | Literal["all"] = "all"

    @abstractmethod
    def pictures(self) -> Pictures:
        """Return all images and their labels."""

    def chosen_classes(self) -> tuple[int, ...]:
        """Return the numbers of the chosen classes. Raise if they are invalid."""
        if self.classes == "all":
            return tuple(range(len(self.names)))
        chosen = self.classes
        unknown = [k for k in chosen if not 0 <= k < len(self.names)]
        if unknown:
            labels_and_names = [
                str(k) if name == str(k) else f"{k} ({name})"
                for k, name in enumerate(self.names)
            ]
            raise Mistake(
                f"data.classes={[*chosen]}: there is no class {unknown[0]}; choose from "
                f"{', '.join(labels_and_names)}"
            )
        if len(set(chosen)) < max(2, len(chosen)):
            raise Mistake(
                f"data.classes={[*chosen]}: name at least two classes, each once, or all"
            )
        return chosen

    def examples(self, generator: torch.Generator) -> Examples:
        chosen = self.chosen_classes()
        pictures, labels = self.pictures()
        if int(labels.max()) >= len(self.names):
            raise Mistake(
                f"there is a label {int(labels.max())}, and the labels go from 0 to "
                f"{len(self.names) - 1}"
            )
        # label ↦ index among the chosen classes, or −1
        index_of_label = torch.full((len(self.names),), -1)
        index_of_label[list(chosen)] = torch.arange(len(chosen))
        target = index_of_label[labels.long()]
        keep = target >= 0
        names = tuple(self.names[k] for k in chosen)
        return Examples(pictures[keep], target[keep], names, self.white)


class Digits(AbstractImages):
    """Handwritten digits of 8 × 8 pixels with 17 grey levels:
    the test part of the UCI data set.

    1797 images in ten classes, about 180 in each.

    >>> Digits(train=100).split().train.inputs.shape
    torch.Size([100, 1, 8, 8])
    """

    names = tuple("0123456789")
    white = 16.0
    classes: tuple[int, ...] | Literal["all"] = (3, 8)

    def pictures(self) -> Pictures:
        return read_small_pictures("digits")


def read_small_pictures(name: str) -> Pictures:
    """Read one of the package's data sets of 8 × 8 pixels."""
    greys, labels = read_bundled(name)
    return greys.to(torch.uint8).reshape(-1, 1, 8, 8), labels.long()


CLOTHES = (
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


class Clothes(AbstractImages):
    """Clothes of 8 × 8 pixels with 17 grey levels: images of Fashion-MNIST,
    reduced like `digits`.

    1800 images, the first 180 of each of ten classes in the training set. Each image
    was padded by two pixels, averaged over 4 × 4 pixels, and rounded to 0 … 16. H.
    Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a novel image dataset for
    benchmarking" (2017), arXiv:1708.07747.

    >>> Clothes(train=100).split().train.inputs.shape
    torch.Size([100, 1, 8, 8])
    """

    names = CLOTHES
    white = 16.0
    classes: tuple[int, ...] | Literal["all"] = (0, 6)

    def pictures(self) -> Pictures:
        return read_small_pictures("clothes")


MNIST_ADVICE = "get the files from storage.googleapis.com/cvdf-datasets/mnist"


class MNIST(AbstractImages):
    """MNIST: 60,000 handwritten digits of 28 × 28 pixels,
    from the IDX training files in a folder.

    Ten classes; the default `classes` are two of them. The set is large, so `test`
    defaults to 1024; null means all other images.

    Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-based learning applied to
    document recognition" (1998)."""

    names = tuple("0123456789")
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (3, 8)
    path: UserPath

    def files(self) -> tuple[Path, ...]:
        return find_idx_files(self.path, MNIST_ADVICE)

    def pictures(self) -> Pictures:
        return read_idx_pictures(*find_idx_files(self.path, MNIST_ADVICE))


DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_ADVICE = (
    "install Debian's package dataset-fashion-mnist, "
    "or get the files from github.com/zalandoresearch/fashion-mnist"
)


class FashionMnist(AbstractImages):
    """Fashion-MNIST: 60,000 clothes of 28 × 28 pixels,
    from the IDX training files in a folder.

    Ten classes; the default `classes` are two of them. The set is large, so `test`
    defaults to 1024; null means all other images. `path` defaults to the folder of
    Debian's package dataset-fashion-mnist.

    H. Xiao, K. Rasul and R. Vollgraf,
    "Fashion-MNIST: a novel image dataset for benchmarking" (2017), arXiv:1708.07747.
    """

    names = CLOTHES
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (0, 6)
    path: UserPath | None = None

    def files(self) -> tuple[Path, ...]:
        return find_idx_files(self.path or DEBIAN_FOLDER, FASHION_MNIST_ADVICE)

    def pictures(self) -> Pictures:
        return read_idx_pictures(*self.files())


class CIFAR10(AbstractImages):
    """CIFAR-10: colour photographs of 32 × 32 pixels,
    from a folder with the python or binary files.

    Ten classes; the default `classes` are two of them. The set is large, so `test`
    defaults to 1024; null means all other images. `path` defaults to the folder in the
    environment variable CIFAR10.

    A. Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
    """

    names = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (3, 5)
    path: UserPath | None = None

    @property
    def folder(self) -> Path:
        folder = self.path or os.environ.get("CIFAR10")
        if not folder:
            raise NoData(
                f"data.path: neither it nor the variable CIFAR10 names a folder; {CIFAR10_ADVICE}"
            )
        return expand_home(Path(folder))

    def files(self) -> tuple[Path, ...]:
        return find_batches(self.folder)

    def pictures(self) -> Pictures:
        return read_batches(find_batches(self.folder))
