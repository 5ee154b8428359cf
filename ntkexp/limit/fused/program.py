"""Layers as one program for tiles, level by level, and as the tables that compiled loops read.

Operations level by level: those on tiles of one size, until strides or pools make their images coarser.

A register belongs to the level of its image. Those on other levels do not meet it, so that all that happens on a level
comes before all that happens on coarser ones.

>>> from ntkexp.layer import base as chain
>>> from ntkexp.layer.affine import Conv
>>> from ntkexp.layer.pointwise import ReLU
>>> fine, coarse = levels(chain.fused((Conv(features=2, stride=2), ReLU()), (1, 6, 6), 0, 1), (1, 6, 6))
>>> len(fine.operations), len(coarse.operations), coarse.sizes
(2, 1, (1, 3, 3))

Where the pixels of a tile go that departs for a coarser image, axis by axis.

Of the offset o, the pixels p and p + o belong to coarse pixels p′ and q′, or to none, and go to p′ of the tile whose
offset is q′ − p′. A slot says both, tiles being one after the other; those of three axes add up.

>>> slots(Coarse.windows(4, 2), 4, range(4), range(2), tile=10, unit=1).tolist()
[[0, 0, 1, 1], [0, 10, 1, 11], [10, 10, 11, 11], [10, 0, 11, 1]]

Layers as one program for tiles, as far as they say their fused form: all of them if they are of vectors, else up to
where an image becomes a vector, or, once it got smaller, up to the first layer that says none.

>>> from ntkexp.layer.affine import Dense
>>> from ntkexp.layer.pointwise import ReLU
>>> found = program((Dense(features=3), ReLU(), Dense(features=1)), (2,))
>>> [KINDS[operation.kind] for level in found.levels for operation in level.operations]
['bend', 'weigh']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ntkexp.covariance.pairs import (
    ADD,
    BEND,
    CLEANING,
    CLEAR,
    COARSEN,
    COPY,
    KINDS,
    SERIES,
    WEIGH,
    WRAP,
    Coarse,
    NoFusedForm,
    Operation,
    Operations,
    Pairs,
    clear,
    coarsen,
    needed,
)
from ntkexp.layer import base
from ntkexp.layer.base import AbstractLayer
from ntkexp.layer.pointwise import ROUNDING
from ntkexp.limit.network import Side

Sizes = tuple[int, int, int]
NOT_KNOWN = Pairs((), ())
UNEQUAL = "a layer whose branches get smaller in different steps"


@dataclass(frozen=True)
class Level:
    """What happens to tiles of an image of these sizes, at the offsets of these pairs of pixels.

    Arriving registers were left by the level before; the first level begins with inputs. What departs is left in
    registers of the level after, or, on the last, as it is.
    """

    sizes: Sizes
    arrivals: tuple[int, ...] = ()
    operations: Operations = ()
    departures: Operations = ()
    pairs: Pairs = NOT_KNOWN

    @property
    def registers(self) -> int:
        """How many tiles are at work."""
        there = (max(operation.register, operation.other) for operation in (*self.operations, *self.departures))
        return 1 + max((0, *self.arrivals, *there))

    @property
    def reach(self) -> Sizes:
        """The largest of any window."""
        deep, down, across = zip((0, 0, 0), *(operation.reach for operation in self.operations), strict=True)
        return max(deep), max(down), max(across)

    @property
    def around(self) -> bool:
        """Whether an image continues on its other side anywhere."""
        return any(operation.kind == WRAP for operation in self.operations)

    @property
    def kept(self) -> Operations:
        """What departs if this is the last level, whose tiles are kept."""
        return (coarsen(0, [Coarse.every(n, 1) for n in self.sizes]),)


def levels(operations: Operations, sizes: Sizes) -> tuple[Level, ...]:
    """Put each operation on the level of its register."""
    found, at = [Level(sizes)], {0: 0}
    for operation in operations:
        here = at[operation.register]
        if operation.kind == ADD and at[operation.other] != here:
            raise NoFusedForm(UNEQUAL)
        if operation.kind == COPY:
            at[operation.other] = here
        if operation.kind != COARSEN:
            found[here] = replace(found[here], operations=(*found[here].operations, operation))
            continue
        found[here + 1 : here + 2] = [after(operation, found[here + 1 : here + 2])]
        found[here] = replace(found[here], departures=(*found[here].departures, operation))
        at[operation.register] = here + 1
    return tuple(found)


def after(operation: Operation, coarser: Sequence[Level]) -> Level:
    """The level to which a register goes, which is there or is made."""
    deep, down, across = (len(one.members) for one in operation.coarse)
    level = coarser[0] if coarser else Level((deep, down, across))
    if level.sizes != (deep, down, across):
        raise NoFusedForm(UNEQUAL)
    return replace(level, arrivals=(*level.arrivals, operation.register))


def paired(found: tuple[Level, ...], wanted: Pairs) -> tuple[Level, ...]:
    """The levels with the pairs that they need, of those wanted at the end, in an image of three axes."""
    last = replace(found[-1], pairs=wanted)
    if len(found) == 1:
        return (last,)
    finer = (needed(operation.coarse, wanted, found[-2].sizes) for operation in found[-2].departures)
    return (*paired(found[:-1], reduce(Pairs.union, finer)), last)


Array = np.ndarray[Any, Any]
NOWHERE = -1


@dataclass(frozen=True)
class Departures:
    """The registers that depart, the share of a pixel in the mean that it becomes part of, and its slots."""

    registers: Array
    shares: Array
    slots: tuple[Array, ...]  # along each axis, [departure, offset, pixel], or nowhere
    order: Array  # of the pixels in a row, [departure, pixel]


def departures(level: Level, after: Pairs, dtype: Any) -> Departures:
    """What departs from a level, for these pairs of coarse pixels."""
    registers = np.array([step.register for step in level.departures], np.int64)
    shares = [1 / prod(len(one.members[0]) ** 2 for one in step.coarse) for step in level.departures]
    slots = tuple(along(level, after, axis) for axis in range(3))
    order = np.array([apart(step.coarse[2], level.sizes[2]) for step in level.departures], np.int64)
    return Departures(registers, np.array(shares, dtype), slots, order.reshape(-1, level.sizes[2]))


def apart(coarse: Coarse, pixels: int) -> list[int]:
    """All pixels: the first members of coarse pixels, then the second, and so on.

    >>> apart(Coarse.windows(4, 2), 4)
    [0, 2, 1, 3]
    """
    rank = {p: k for members in coarse.members for k, p in enumerate(members)}
    return sorted(range(pixels), key=lambda p: (rank.get(p, 0), p))


def along(level: Level, after: Pairs, axis: int) -> Array:
    """The slots of all that departs, along an axis."""
    fine, wanted = level.pairs.offsets[axis], after.offsets[axis]
    tile = prod(after.pixels) * prod(len(offsets) for offsets in after.offsets[axis + 1 :])
    unit = prod(after.pixels[axis + 1 :])
    found = np.zeros((len(level.departures), len(fine), level.sizes[axis]), np.int64)
    for k, step in enumerate(level.departures):
        found[k] = slots(step.coarse[axis], level.sizes[axis], fine, wanted, tile, unit)
    return found


def slots(coarse: Coarse, pixels: int, fine: Sequence[int], wanted: Sequence[int], tile: int, unit: int) -> Array:
    """The slots of all pixels, [offset, pixel], where a tile takes so many numbers, and a pixel of this axis a unit."""
    owner = np.full(pixels, NOWHERE)
    for number, members in enumerate(coarse.members):
        owner[list(members)] = number
    place = np.full(len(coarse.members), NOWHERE)
    place[list(wanted)] = np.arange(len(wanted))
    second = owner[(np.arange(pixels) + np.array(fine)[:, None]) % pixels]
    number = place[(second - owner) % len(place)]
    there = (owner != NOWHERE) & (second != NOWHERE) & (number != NOWHERE)
    return np.where(there, number * tile + owner * unit, NOWHERE)


# --- What the compiled loops read: operations and fields as arrays.


Laid: TypeAlias = Sequence[tuple[Tensor, ...]]
"""For each operation that meets variances, its fields, [example, *pixel]."""


WORDS, WEIGHTS = 8, 8


@dataclass(frozen=True)
class Tables:
    """A row of numbers for every operation of a level, and fields of both sides."""

    operations: Array
    weights: Array
    left: Array
    right: Array
    spread: Array  # the fields of vectors that are laid out for the left side, where the others stay numbers
    rounding: Any  # how near to one a correlation counts as one


def of_images(level: Level, left: Side, right: Side) -> Tables:
    """The tables of images, whose fields are inputs first, if nothing arrives, [image, field, pixel]."""
    one, two = laid(level, left, right)
    pixels = prod(level.sizes)

    def fields(side: Side, laid: Laid) -> Array:
        inputs = (
            side.x.new_zeros(len(side.x), 0, pixels) if level.arrivals else side.x.reshape(*side.x.shape[:2], pixels)
        )
        parts = [inputs, *(end.reshape(len(side.x), 1, pixels) for ends in laid for end in ends)]
        return np.ascontiguousarray(torch.cat(parts, 1).numpy())

    return Tables(
        *rows(level, one, left.x), fields(left, one), fields(right, two), spread(level, one), rounding(left.x)
    )


def of_vectors(level: Level, left: Side, right: Side) -> Tables:
    """The tables of vectors, whose fields are [example, field]."""
    one, two = laid(level, left, right)
    fields = (torch.stack([end for ends in laid for end in ends], 1).contiguous().numpy() for laid in (one, two))
    return Tables(*rows(level, one, left.x), next(fields), next(fields), spread(level, one), rounding(left.x))


def pair_count(level: Level, left: Side, right: Side) -> int:
    """How many fields images have, but for inputs."""
    met = ((step.ends, left.variances[step.met], right.variances[step.met]) for step in level.operations if step.ends)
    return sum(len(ends(torch.maximum(one.max(), two.max())[None])) for ends, one, two in met)


def laid(level: Level, left: Side, right: Side) -> tuple[Laid, Laid]:
    """What the operations that meet variances ask to be laid out, of the examples of both sides."""
    sides, size = [left] if left is right else [left, right], len(left.x)
    found = [
        step.ends(torch.cat([side.variances[step.met] for side in sides])) for step in level.operations if step.ends
    ]
    first = [tuple(end[:size] for end in ends) for ends in found]
    return first, first if left is right else [tuple(end[size:] for end in ends) for ends in found]


def rows(level: Level, laid: Laid, x: Tensor) -> tuple[Array, Array]:
    """Each operation has its kind, registers, reach across, down and deep, first field and end of fields; and s, b, α,
    β, whether the rows beside are still to be added, and up to three constants.
    """
    operations, fields, before = level.operations, iter(laid), 0
    words, weights = np.zeros((len(operations), WORDS), np.int64), np.zeros((len(operations), WEIGHTS))
    for k, step in enumerate(operations):
        beyond = before + (len(next(fields)) if step.meets else 0)
        words[k] = (step.kind, step.register, step.other, *reversed(step.reach), before, beyond)
        numbers = (*step.weights, float(step.reach[1] == 1), *step.constants)
        weights[k, : len(numbers)] = numbers
        before = beyond
    return words, weights.astype(x.numpy().dtype)


def spread(level: Level, laid: Laid) -> Array:
    """The fields of all operations but for coefficients of series."""
    kinds = [step.kind for step in level.operations if step.meets]
    each = [kind == SERIES and place > 1 for kind, ends in zip(kinds, laid, strict=True) for place in range(len(ends))]
    return np.array([field for field, number in enumerate(each) if not number], np.int64)


def rounding(x: Tensor) -> Any:
    """How near to one a correlation counts as one."""
    eps = torch.finfo(x.dtype).eps
    return torch.tensor(ROUNDING * eps, dtype=x.dtype).numpy()[()]


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
            more = (*operations, *base.fused((layer,), before, 0, 1))
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
    if last.averages and base.says_itself(last, "averages"):
        wanted = full(last.need(Pairs((), ()), before))
        return TileProgram(paired(found, wanted), shape[0], last, layers[known + 1 :], last.shape(before))
    rest = layers[known:]
    wanted = full(base.need(rest, Pairs((), ()), before))
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
