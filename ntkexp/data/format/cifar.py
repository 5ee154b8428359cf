"""The files of CIFAR-10, in both versions that its authors publish; an image is 3 × 32 × 32 bytes.

    binary    data_batch_1.bin …   records of a label and 3072 bytes
    python    data_batch_1 …       a pickle of {b"data": bytes [n, 3072], b"labels": list of n}

The batches that are in the folder are read, the official test batch is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ntkexp.data.format.unpickle import Array, Forbidden, plain
from ntkexp.data.format.user_path import contents, is_there, quoted
from ntkexp.mistake import Mistake

PIXELS = 3 * 32 * 32
Records = UInt8[np.ndarray, "example 1+3*32*32"]


def batches(folder: Path) -> tuple[Path, ...]:
    """Find the training batches in a folder; the binary ones, should both versions be there."""
    for ending in (".bin", ""):
        found = tuple(path for k in range(1, 6) if is_there(path := folder / f"data_batch_{k}{ending}"))
        if found:
            return found
    raise Mistake(
        f"{quoted(folder)} is no folder with data_batch_1 or data_batch_1.bin; unpack cifar-10-python.tar.gz or "
        "cifar-10-binary.tar.gz of www.cs.toronto.edu/~kriz/cifar.html and name the folder that holds the batches"
    )


def pictures(paths: tuple[Path, ...]) -> tuple[UInt8[Tensor, "example 3 32 32"], UInt8[Tensor, " example"]]:
    """Read images and labels of all batches, one after the other."""
    records = np.concatenate([binary(path) if path.suffix == ".bin" else pickled(path) for path in paths])
    together = torch.from_numpy(records)
    return together[:, 1:].reshape(-1, 3, 32, 32), together[:, 0]


def binary(path: Path) -> Records:
    """Read the records of a file in the binary version."""
    raw = contents(path)
    if not raw or len(raw) % (1 + PIXELS):
        raise Mistake(f"{quoted(path)} is cut short or damaged: {len(raw)} bytes are not whole records of {1 + PIXELS}")
    return np.frombuffer(raw, np.uint8).reshape(-1, 1 + PIXELS)


def pickled(path: Path) -> Records:
    """Read the records of a file in the python version."""
    raw = contents(path)
    try:
        return joined(plain(raw))
    except Forbidden as error:
        raise Mistake(f"{quoted(path)} is no CIFAR-10 batch: it asks for {str(error)!r}, not for an array") from error
    except Exception as error:  # a damaged pickle can make its reader raise anything
        raise Mistake(f"{quoted(path)} is cut short or damaged: it is no CIFAR-10 batch") from error


def joined(batch: Any) -> Records:
    """Put labels in front of their images; a batch that was written anew may name them by texts."""
    named = {key.encode() if isinstance(key, str) else key: part for key, part in batch.items()}
    match named:
        case {b"data": Array(values=pixels), b"labels": [*labels]} if labels and pixels.shape == (len(labels), PIXELS):
            return np.column_stack([np.array(labels, np.uint8), pixels])
    raise ValueError("no images with labels")
