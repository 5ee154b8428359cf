"""Layers as one program for tiles, as far as they say their fused form: all of them if they are of vectors, else up to
where an image gets smaller or becomes a vector.

>>> from ntkexp.layer.affine import Dense
>>> from ntkexp.layer.pointwise import ReLU
>>> found = program((Dense(features=3), ReLU(), Dense(features=1)), (2,))
>>> [KINDS[operation.kind] for operation in found.operations]
['bend', 'weigh']
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from ntkexp.covariance.operation import (
    ADD,
    BEND,
    CLEANING,
    CLEAR,
    COPY,
    KINDS,
    WEIGH,
    WRAP,
    NoFusedForm,
    Operation,
    Operations,
    clear,
)
from ntkexp.layer import chain
from ntkexp.layer.base import AbstractLayer

__all__ = ["KINDS", "TileProgram", "program"]


@dataclass(frozen=True)
class TileProgram:
    """What happens to tiles of an image of these sizes.

    Where it has an `end`, the mean over the pairs of pixels that this layer needs is asked for; otherwise the tiles
    themselves. The `rest` of the layers takes examples of shape `rest_shape`.
    """

    operations: Operations
    channels: int
    sizes: tuple[int, int, int]
    end: AbstractLayer | None
    rest: tuple[AbstractLayer, ...]
    rest_shape: tuple[int, ...]

    @property
    def met(self) -> int:
        """How many nonlinear layers there are."""
        return sum(operation.meets for operation in self.operations)

    @property
    def registers(self) -> int:
        """How many tiles are at work."""
        return 1 + max(max(operation.register, operation.other) for operation in self.operations)

    @property
    def reach(self) -> tuple[int, int, int]:
        """The largest of any window."""
        deep, down, across = zip(*(operation.reach for operation in self.operations), strict=True)
        return max(deep), max(down), max(across)

    @property
    def around(self) -> bool:
        """Whether an image continues on its other side anywhere."""
        return any(operation.kind == WRAP for operation in self.operations)


def program(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> TileProgram:
    """The operations of the first layers, if what comes after them is little: vectors, or fewer pixels."""
    operations: Operations = ()
    known, before = 0, shape
    try:
        for layer in layers:
            operations, before = (*operations, *chain.fused((layer,), before, 0, 1)), layer.shape(before)
            known += 1
    except NoFusedForm:
        if len(shape) == 1 or layers[known].shape(before)[1:] == before[1:]:
            raise
    if not any(operation.meets for operation in operations):
        stranger = f"{type(layers[known]).__name__} before any activation" if layers[known:] else "a linear network"
        raise NoFusedForm(stranger)
    if len(shape) == 1:
        return TileProgram(joined(operations), shape[0], (1, 1, 1), None, (), before)
    planes, rows, columns = (1, 1, *shape[1:])[-3:]
    operations, last = joined((*operations, clear(0))), layers[known]
    if last.averages and chain.says_itself(last, "averages"):
        return TileProgram(operations, shape[0], (planes, rows, columns), last, layers[known + 1 :], last.shape(before))
    return TileProgram(operations, shape[0], (planes, rows, columns), None, layers[known:], before)


def joined(operations: Operations) -> Operations:
    """Weights and the bent line after them as one operation; tiles are cleared only where it takes that."""
    found: list[Operation] = []
    clean = {0}
    for operation in numbered(operations):
        last = found[-1] if found else None
        if operation.kind == CLEAR and operation.register in clean:
            continue
        if operation.kind == BEND and last and last.kind == WEIGH and last.register == operation.register:
            found[-1] = replace(operation, reach=last.reach, weights=last.weights)
        else:
            found.append(operation)
        clean = cleaned(clean, operation)
    return tuple(found)


def numbered(operations: Operations) -> Iterator[Operation]:
    """The operations, each that meets variances with its number among them."""
    numbers = count()
    for operation in operations:
        yield replace(operation, met=next(numbers)) if operation.meets else operation


def cleaned(clean: set[int], operation: Operation) -> set[int]:
    """The registers that hold zeros outside the image."""
    register, other = operation.register, operation.other
    if operation.kind in CLEANING:
        return clean | {register}
    if operation.kind == COPY:
        return clean | {other} if register in clean else clean - {other}
    return clean if operation.kind == ADD and other in clean else clean - {register}
