"""Pickles that hold nothing but plain values and arrays of bytes.

A pickle is a program. The few names that an array of bytes needs are answered here by inert stand-ins, every other
name is refused, so nothing that a file says is ever called:

    numpy.core.multiarray._reconstruct(numpy.ndarray, (0,), 'b') ← (version, shape, dtype, column order, bytes)

>>> import pickle
>>> plain(pickle.dumps({"labels": [1, 2]}))
{'labels': [1, 2]}
>>> plain(pickle.dumps(print))
Traceback (most recent call last):
ntkexp.data.format.unpickle.Forbidden: builtins.print
"""

from __future__ import annotations

import pickle
from io import BytesIO

import numpy as np
from jaxtyping import UInt8


class Forbidden(pickle.UnpicklingError):
    """A pickle asks for a name that no array needs."""


class Type:
    """Stands for numpy.dtype, and remembers its name."""

    def __init__(self, name: bytes | str, *flags: int) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which bytes do not have."""


class Array:
    """Stands for numpy.ndarray, and keeps its bytes."""

    def __init__(self, *empty: object) -> None:
        self.values: UInt8[np.ndarray, "..."] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], Type, bool, bytes]) -> None:
        _, shape, kind, column_order, raw = state
        if kind.name != "u1":
            raise ValueError(f"an array of {kind.name}, not of bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if column_order else "C")


STAND_INS = {
    "numpy.dtype": Type,
    "numpy.ndarray": Array,
    "numpy.core.multiarray._reconstruct": Array,
    "numpy._core.multiarray._reconstruct": Array,
}


class Restricted(pickle.Unpickler):
    """Knows the stand-ins, and no other name."""

    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" not in STAND_INS:
            raise Forbidden(f"{module}.{name}")
        return STAND_INS[f"{module}.{name}"]


def plain(raw: bytes) -> object:
    """What the pickle holds; texts of Python 2 come as bytes."""
    return Restricted(BytesIO(raw), encoding="bytes").load()
