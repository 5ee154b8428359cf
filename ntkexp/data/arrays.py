"""A user's own arrays, from a file of NumPy (NPZ).

The dtype of the targets decides whether they are classes:

>>> read_targets(np.array([7, 3, 7]), "y")
(tensor([1, 0, 1]), ('3', '7'))
>>> read_targets(np.array([0.5, 2.0]), "y")
(tensor([[0.5000],
        [2.0000]], dtype=torch.float64), ())
"""

from __future__ import annotations

import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ntkexp.data.base import (
    MAX_FILE_BYTES,
    AbstractSource,
    Examples,
    UserPath,
    one_line,
    quoted,
    read_contents,
    require_file,
)
from ntkexp.mistake import Mistake, nearest

MAX_CLASSES = 1000
WHITE_BYTE = 255
CLASS_KINDS = "biuU"  # NumPy's kinds of truth values, integers and texts
NUMBER_KINDS = "biuf"
# zipfile raises RuntimeError for encryption and unknown compression
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


class Arrays(AbstractSource):
    """Arrays from a file of NumPy (`np.savez`).

        np.savez("mine.npz", x=inputs, y=labels)
        ntkexp train data=arrays data.path=mine.npz

    `inputs` and `targets` name the two arrays in the file. Inputs have the shape
    [example, …]: [example, feature] for a fully connected network, and [example,
    channel, row, column] for images. Integers, truth values and texts as targets are
    classes, in sorted order. Floating-point numbers [example] or [example, output] are
    real targets.
    """

    path: UserPath
    inputs: str = "x"
    targets: str = "y"

    def files(self) -> tuple[Path, ...]:
        return (require_file(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        names = {"inputs": self.inputs, "targets": self.targets}
        arrays = read_arrays(self.path, names)
        inputs, targets = (arrays[name] for name in names.values())
        if inputs.ndim < 2 or not inputs[:1].size:
            raise Mistake(
                f"data.inputs={self.inputs}: the array has shape {list(inputs.shape)}; give "
                "examples with at least one number, [example, feature] or [example, …]"
            )
        if len(targets) != len(inputs):
            raise Mistake(
                f"{quoted(self.path)} holds {len(inputs)} inputs '{self.inputs}' and "
                f"{len(targets)} targets '{self.targets}'; give one target for each input"
            )
        values, white = read_inputs(inputs, self.inputs)
        target, classes = read_targets(targets, self.targets)
        return Examples(values, target, classes, white)


def read_inputs(
    array: Shaped[np.ndarray, " example *shape"], name: str
) -> tuple[Tensor, float]:
    """Return the inputs as a tensor, and the value `white` of intensity 1.

    Arrays of bytes are images with intensities from 0 to 255.
    """
    if array.dtype.kind not in NUMBER_KINDS:
        raise Mistake(
            f"data.inputs={name}: the array holds {array.dtype} and not real numbers; convert it"
        )
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array)), WHITE_BYTE
    return torch.from_numpy(array.astype(np.float64)), 1.0


def read_targets(
    array: Shaped[np.ndarray, " example *value"], name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Return class labels and class names, or real values [example, value] and ()."""
    if array.dtype.kind == "f" and array.ndim in (1, 2):
        values: Float[Tensor, "example value"] = torch.from_numpy(
            array.astype(np.float64).reshape(len(array), -1)
        )
        return values, ()
    if array.dtype.kind not in CLASS_KINDS or array.ndim != 1:
        raise Mistake(
            f"data.targets={name}: the array holds {array.dtype} of shape {list(array.shape)}; give "
            "integers, truth values or texts [example] as classes, or floating-point numbers "
            "[example] or [example, output]"
        )
    classes, labels = np.unique(array, return_inverse=True)
    if len(classes) > MAX_CLASSES:
        raise Mistake(
            f"data.targets={name}: the array holds {len(classes)} different integers or texts, "
            f"and at most {MAX_CLASSES} can be classes; for real targets, save it with "
            ".astype(float)"
        )
    return torch.from_numpy(labels), tuple(one_line(str(label)) for label in classes)


def read_arrays(
    path: Path, names: dict[str, str]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Read arrays from an NPZ file by name. `names` are the values of the keys
    `data.inputs` and `data.targets`.

    Raise if an array contains Python objects, because loading these could run code.
    """
    raw = read_contents(path)
    if not zipfile.is_zipfile(BytesIO(raw)):
        raise Mistake(
            f"{quoted(path)} is not an NPZ file; np.savez(FILE, x=inputs, y=targets) writes one"
        )
    try:
        with np.load(BytesIO(raw), allow_pickle=False) as archive:
            for key, name in names.items():
                require_array(path, key, name, archive)
            return {name: archive[name] for name in names.values()}
    except Mistake:
        raise
    except UNREADABLE as error:
        reason = one_line(str(error))
        if "allow_pickle" in reason:
            reason = "an array of Python objects is never read; save numbers or texts"
        raise Mistake(f"{quoted(path)} cannot be read: {reason}") from error


def require_array(path: Path, key: str, name: str, archive: Any) -> None:
    """Raise unless the archive holds this array, within the size limit."""
    if name not in archive.files:
        held = ", ".join(map(repr, archive.files)) or "no array"
        raise Mistake(
            f"data.{key}={name}: {quoted(path)} holds {one_line(held)}"
            f"{nearest(name, archive.files)}"
        )
    size = sum(
        member.file_size
        for member in archive.zip.infolist()
        if member.filename in (name, f"{name}.npy")
    )
    if size > MAX_FILE_BYTES:
        raise Mistake(
            f"data.{key}={name}: the array takes {size / 1e9:.3g} GB, and at most "
            f"{MAX_FILE_BYTES / 1e9:.3g} GB are read"
        )
