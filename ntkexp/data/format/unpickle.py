"""Pickles that hold nothing but plain values and arrays of bytes.

A pickle is a program. The few names that an array of bytes needs are answered here by inert stand-ins, every other
name is refused, so nothing that a file says is ever called:

    numpy.core.multiarray._reconstruct(numpy.ndarray, (0,), 'b') ← (version, shape, dtype, column order, bytes)
    numpy._core.numeric._frombuffer(bytes, dtype, shape, order)     since protocol 5
    _codecs.encode(text, 'latin1')                                  bytes, before protocol 3

>>> import pickle
>>> plain(pickle.dumps({"labels": [1, 2]}))
{'labels': [1, 2]}
>>> plain(pickle.dumps(print))
Traceback (most recent call last):
ntkexp.data.format.unpickle.Forbidden: builtins.print
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO

import numpy as np
from jaxtyping import UInt8


class Forbidden(pickle.UnpicklingError):
    """A pickle asks for a name that no array needs."""


class Type:
    """A stand-in for numpy.dtype, which remembers its name."""

    def __init__(self, name: bytes | str, *flags: int) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """The byte order and the like are forgotten, which bytes do not have."""


class Array:
    """A stand-in for numpy.ndarray, which keeps its bytes."""

    def __init__(self, *empty: object) -> None:
        self.values: UInt8[np.ndarray, "..."] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], Type, bool, bytes]) -> None:
        _, shape, kind, column_order, raw = state
        if kind.name != "u1":
            raise ValueError(f"an array of {kind.name}, not of bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if column_order else "C")


def from_buffer(raw: bytes, kind: Type, shape: tuple[int, ...], order: str) -> Array:
    """A stand-in for the function of this name, which keeps the bytes."""
    array = Array()
    array.__setstate__((1, shape, kind, order == "F", raw))
    return array


def encoded(text: str, encoding: str) -> bytes:
    """A stand-in for the codec that bytes come in."""
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
    "_codecs.encode": encoded,
}


class Restricted(pickle.Unpickler):
    """An unpickler that knows the stand-ins, and no other name."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if f"{module}.{name}" not in STAND_INS:
            raise Forbidden(f"{module}.{name}")
        return STAND_INS[f"{module}.{name}"]


def plain(raw: bytes) -> object:
    """What the pickle holds; texts of Python 2 come as bytes."""
    return Restricted(BytesIO(raw), encoding="bytes").load()
