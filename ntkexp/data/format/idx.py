"""IDX, the format of MNIST: bytes in an array of any number of axes, gzipped or not.

    0 0 type axes | one big-endian 32-bit length per axis | the data, last axis fastest

Only the training pair is read (60,000 images in MNIST and its likes): the splits are cut from it, and the official
test pair stays unseen.
"""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path
from struct import unpack

import torch
from jaxtyping import UInt8
from torch import Tensor

from ntkexp.data.format.user_path import contents, is_there, quoted
from ntkexp.mistake import Mistake

IMAGES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte")
LABELS = ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte")
BYTE = 0x08


def pair(folder: Path, advice: str) -> tuple[Path, Path]:
    """Find the files with the training images and their labels."""
    return find(folder, IMAGES, advice), find(folder, LABELS, advice)


def find(folder: Path, names: tuple[str, ...], advice: str) -> Path:
    """Find the file of one of these names, gzipped or not."""
    for name in (*names, *(f"{name}.gz" for name in names)):
        if is_there(folder / name):
            return folder / name
    raise Mistake(f"{quoted(folder)} is no folder with {names[0]} or {names[0]}.gz; {advice}")


def pictures(images: Path, labels: Path) -> tuple[UInt8[Tensor, "example 1 row column"], UInt8[Tensor, " example"]]:
    """Read images of one channel, with their labels."""
    shown, classes = array(images, axes=3), array(labels, axes=1)
    if len(shown) != len(classes):
        raise Mistake(f"{quoted(images)} holds {len(shown)} images, and {labels.name} {len(classes)} labels")
    return shown[:, None], classes


def array(path: Path, axes: int) -> UInt8[Tensor, "..."]:
    """The array of bytes in a file, which must be exactly what its header says."""
    raw = inflated(path)
    if len(raw) < 4 + 4 * axes or raw[:2] != b"\0\0":
        raise Mistake(f"{quoted(path)} is no IDX file: it begins with {raw[:4].hex(' ') or 'nothing'}")
    if raw[2] != BYTE or raw[3] != axes:
        raise Mistake(
            f"{quoted(path)} holds IDX type {raw[2]:#04x} with {raw[3]} axes, where bytes ({BYTE:#04x}) with "
            f"{axes} axes are expected"
        )
    shape, body = unpack(f">{axes}I", raw[4 : 4 + 4 * axes]), raw[4 + 4 * axes :]
    if len(body) != prod(shape) or not body:
        raise Mistake(f"{quoted(path)} is cut short or damaged: {prod(shape)} bytes announced, {len(body)} found")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape(shape)


def inflated(path: Path) -> bytes:
    """The bytes of a file, unzipped if need be."""
    raw = contents(path)
    try:
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, OSError, zlib.error) as error:
        raise Mistake(f"{quoted(path)} is cut short or damaged: it cannot be unzipped") from error
