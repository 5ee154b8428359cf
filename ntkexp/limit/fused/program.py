"""Layers as one program for tiles, as far as they say their fused form: all of them if they are of vectors, else up to
where an image becomes a vector, or, once it got smaller, up to the first layer that says none.

>>> from ntkexp.layer.affine import Dense
>>> from ntkexp.layer.pointwise import ReLU
>>> found = program((Dense(features=3), ReLU(), Dense(features=1)), (2,))
>>> [KINDS[operation.kind] for level in found.levels for operation in level.operations]
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
    NoFusedForm,
    Operation,
    Operations,
    clear,
)
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import chain
from ntkexp.layer.base import AbstractLayer
from ntkexp.limit.fused.levels import Level, Sizes, levels, paired

__all__ = ["KINDS", "TileProgram", "program"]


@dataclass(frozen=True)
class TileProgram:
    """What happens to tiles, from the finest images to the coarsest.

    Where it has an `end`, the mean over the pairs of pixels that this layer needs is asked for; otherwise the tiles
    themselves, which are what is left to depart from the last level. The `rest` of the layers takes examples of shape
    `rest_shape`.
    """

    levels: tuple[Level, ...]
    channels: int
    end: AbstractLayer | None
    rest: tuple[AbstractLayer, ...]
    rest_shape: tuple[int, ...]

    @property
    def met(self) -> int:
        """How many nonlinear layers there are."""
        return sum(operation.meets for level in self.levels for operation in level.operations)

    @property
    def departed(self) -> tuple[Pairs, ...]:
        """The pairs of pixels that there are of what departs from each level."""
        return (*(level.pairs for level in self.levels[1:]), self.levels[-1].pairs)


def program(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> TileProgram:
    """The operations of the first layers, if what comes after them is little: vectors, or fewer pixels."""
    operations: Operations = ()
    known, before, (planes, rows, columns) = 0, shape, (1, 1, 1, *shape[1:])[-3:]
    sizes = (planes, rows, columns)
    try:
        for layer in layers:
            more = (*operations, *chain.fused((layer,), before, 0, 1))
            levels(more, sizes)
            operations, before, known = more, layer.shape(before), known + 1
    except NoFusedForm:
        if len(shape) == 1 or layers[known].shape(before)[1:] == shape[1:]:
            raise
    if len(shape) == 1:
        if not any(operation.meets for operation in operations):
            raise NoFusedForm("a linear network")
        return TileProgram(
            (Level((1, 1, 1), operations=joined(tuple(numbered(operations)), {0})),), shape[0], None, (), before
        )
    found, last = by_levels((*operations, clear(0)), sizes), layers[known]
    if last.averages and chain.says_itself(last, "averages"):
        wanted = full(last.need(Pairs((), ()), before))
        return TileProgram(paired(found, wanted), shape[0], last, layers[known + 1 :], last.shape(before))
    rest = layers[known:]
    wanted = full(chain.need(rest, Pairs((), ()), before))
    kept = (*found[:-1], replace(found[-1], departures=found[-1].kept))
    return TileProgram(paired(kept, wanted), shape[0], None, rest, before)


def by_levels(operations: Operations, sizes: Sizes) -> tuple[Level, ...]:
    """The operations on images, joined level by level."""
    split = levels(tuple(numbered(operations)), sizes)
    return tuple(replace(one, operations=joined(one.operations, {0, *one.arrivals})) for one in split)


def full(pairs: Pairs) -> Pairs:
    """The same pairs in an image of three axes."""
    missing = 3 - len(pairs.pixels)
    return Pairs((1,) * missing + pairs.pixels, ((0,),) * missing + pairs.offsets)


def joined(operations: Operations, clean: set[int]) -> Operations:
    """Weights and the bent line after them as one operation; tiles are cleared only where it takes that."""
    found: list[Operation] = []
    for operation in operations:
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
