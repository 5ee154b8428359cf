"""Layers as one program for tiles, level by level, and as the tables that compiled loops read.

A register belongs to the level of its image. Those on other levels do not meet it, so that all that happens on a level
comes before all that happens on coarser ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from math import prod
from typing import Any

import numpy as np
import torch

from ntkexp.covariance.covariance import ROUNDING
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
    coarsen,
    pairs_before,
)
from ntkexp.layer import base
from ntkexp.layer.base import AbstractLayer
from ntkexp.limit.network import Side

__all__ = ["KINDS", "TileProgram", "program"]

Array = np.ndarray[Any, Any]
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
    coarsenings: Operations = ()
    pairs: Pairs = NOT_KNOWN

    @property
    def registers(self) -> int:
        """How many tiles are at work."""
        return max(
            1,
            *(1 + arrival for arrival in self.arrivals),
            base.registers((*self.operations, *self.coarsenings)),
        )

    @property
    def reach(self) -> Sizes:
        """The largest of any window."""
        deep, down, across = zip(
            (0, 0, 0), *(operation.reach for operation in self.operations), strict=True
        )
        return max(deep), max(down), max(across)

    @property
    def around(self) -> bool:
        """Whether an image continues on its other side anywhere."""
        return any(operation.kind == WRAP for operation in self.operations)


def levels(operations: Operations, sizes: Sizes) -> tuple[Level, ...]:
    """Put each operation on the level of its register: strides and pools make images coarser, a level each.

    >>> from ntkexp.layer.affine import Conv
    >>> from ntkexp.layer.pointwise import ReLU
    >>> fine, coarse = levels(base.fused((Conv(features=2, stride=2), ReLU()), (1, 6, 6), 0, 1), (1, 6, 6))
    >>> len(fine.operations), len(coarse.operations), coarse.sizes
    (2, 1, (1, 3, 3))
    """
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
        # The register goes to the next level, which is there or is made.
        deep, down, across = (len(one.members) for one in operation.coarse)
        if here + 1 == len(found):
            found.append(Level((deep, down, across)))
        after = found[here + 1]
        if after.sizes != (deep, down, across):
            raise NoFusedForm(UNEQUAL)
        found[here] = replace(found[here], coarsenings=(*found[here].coarsenings, operation))
        found[here + 1] = replace(after, arrivals=(*after.arrivals, operation.register))
        at[operation.register] = here + 1
    return tuple(found)


def joined(operations: Operations, clean: set[int]) -> Operations:
    """Weights and the bent line after them as one operation; tiles are cleared only where it takes that: not those
    registers that hold zeros outside the image, `clean` at first.
    """
    merged: list[Operation] = []
    for operation in operations:
        kind, register, other, last = (
            operation.kind,
            operation.register,
            operation.other,
            merged[-1:],
        )
        if kind == CLEAR and register in clean:
            continue
        if kind == BEND and last and last[0].kind == WEIGH and last[0].register == register:
            merged[-1] = replace(operation, reach=last[0].reach, weights=last[0].weights)
        else:
            merged.append(operation)
        if kind in CLEANING:
            clean = clean | {register}
        elif kind == COPY:
            clean = clean | {other} if register in clean else clean - {other}
        elif kind != ADD or other not in clean:
            clean = clean - {register}
    return tuple(merged)


# --- Where the pixels of a tile go that departs for a coarser image, axis by axis.
#
# Of the offset o, the pixels p and p + o belong to coarse pixels p′ and q′, or to none, and go to p′ of the tile whose
# offset is q′ − p′. A slot says both, tiles being one after the other; those of three axes add up.


NOWHERE = -1


@dataclass(frozen=True)
class Coarsenings:
    """Registers that go to a coarser level: the share of a pixel in the mean that it becomes part of, and its slots."""

    registers: Array
    shares: Array
    slots: tuple[Array, ...]  # along each axis, [coarsening, offset, pixel], or nowhere
    order: Array  # of the pixels in a row, [coarsening, pixel]


def coarsenings(level: Level, after: Pairs, dtype: Any) -> Coarsenings:
    """What goes from a level to a coarser one, for these pairs of coarse pixels."""
    registers = [step.register for step in level.coarsenings]
    shares = [
        1 / prod(len(one.members[0]) ** 2 for one in step.coarse) for step in level.coarsenings
    ]
    found = []
    for axis, (pixels, fine) in enumerate(zip(level.sizes, level.pairs.offsets, strict=True)):
        tile = prod(after.pixels) * prod(len(offsets) for offsets in after.offsets[axis + 1 :])
        unit = prod(after.pixels[axis + 1 :])
        offsets = after.offsets[axis]
        each = [
            slots(step.coarse[axis], pixels, fine, offsets, tile, unit)
            for step in level.coarsenings
        ]
        found.append(np.array(each, np.int64).reshape(-1, len(fine), pixels))
    # In a row come the first members of coarse pixels, then the second, and so on.
    columns, order = level.sizes[2], []
    for step in level.coarsenings:
        rank = {p: k for members in step.coarse[2].members for k, p in enumerate(members)}
        order.append(sorted(range(columns), key=lambda p, rank=rank: (rank.get(p, 0), p)))  # type: ignore[misc]
    return Coarsenings(
        np.array(registers, np.int64),
        np.array(shares, dtype),
        tuple(found),
        np.array(order, np.int64).reshape(-1, columns),
    )


def slots(
    coarse: Coarse, pixels: int, fine: Sequence[int], wanted: Sequence[int], tile: int, unit: int
) -> Array:
    """The slots of all pixels, [offset, pixel], in numbers: tiles are `tile` apart, pixels of this axis `unit`.

    >>> slots(Coarse.windows(4, 2), 4, range(4), range(2), tile=10, unit=1).tolist()
    [[0, 0, 1, 1], [0, 10, 1, 11], [10, 10, 11, 11], [10, 0, 11, 1]]
    """
    owner = np.full(pixels, NOWHERE)
    for number, members in enumerate(coarse.members):
        owner[list(members)] = number
    slot = np.full(len(coarse.members), NOWHERE)
    slot[list(wanted)] = np.arange(len(wanted))
    second = owner[(np.arange(pixels) + np.array(fine)[:, None]) % pixels]
    number = slot[(second - owner) % len(slot)]
    there = (owner != NOWHERE) & (second != NOWHERE) & (number != NOWHERE)
    return np.where(there, number * tile + owner * unit, NOWHERE)


# --- What the compiled loops read: operations and fields as arrays.


WORDS, WEIGHTS = 8, 8


@dataclass(frozen=True)
class Tables:
    """A row of numbers for every operation of a level, and fields of both sides."""

    operations: Array  # kind, registers, reach across, down and deep, first field and end of fields
    weights: Array  # s, b, α, β, whether the rows beside are still to be added, and up to three constants
    left: Array  # of images [image, field, pixel], inputs first if nothing arrives; of vectors [example, field]
    right: Array
    spread: Array  # the fields of vectors that are laid out for the left side, where the others stay numbers
    rounding: Any  # how near to one a correlation counts as one


def tables(level: Level, left: Side, right: Side) -> Tables:
    """The tables of a level, for the examples of both sides."""
    # What the operations that meet variances lay out, of both sides at once.
    sides, size = [left] if left is right else [left, right], len(left.x)
    ends = [(step.ends, step.met) for step in level.operations if step.ends]
    laid = [of(torch.cat([side.variances[met] for side in sides])) for of, met in ends]
    counts, before = iter([len(each) for each in laid]), 0
    words, weights = (
        np.zeros((len(level.operations), n), kind)
        for n, kind in ((WORDS, np.int64), (WEIGHTS, float))
    )
    spread: list[int] = []
    for k, step in enumerate(level.operations):
        beyond = before + (next(counts) if step.ends else 0)
        words[k] = (step.kind, step.register, step.other, *reversed(step.reach), before, beyond)
        numbers = (*step.weights, float(step.reach[1] == 1), *step.constants)
        weights[k, : len(numbers)] = numbers
        # All fields but for coefficients of series.
        spread += range(before, min(beyond, before + 2) if step.kind == SERIES else beyond)
        before = beyond
    vectors, pixels = left.x.dim() == 2, prod(level.sizes)

    def fields(x: torch.Tensor, rows: slice) -> Array:
        inputs = (
            x.new_zeros(len(x), 0, pixels)
            if vectors or level.arrivals
            else x.reshape(*x.shape[:2], pixels)
        )
        parts = [inputs, *(end[rows].reshape(len(x), 1, pixels) for each in laid for end in each)]
        whole = np.ascontiguousarray(torch.cat(parts, 1).numpy())
        return whole.reshape(len(x), -1) if vectors else whole

    one = fields(left.x, slice(0, size))
    two = one if left is right else fields(right.x, slice(size, None))
    rounding = one.dtype.type(ROUNDING * torch.finfo(left.x.dtype).eps)
    return Tables(words, weights.astype(one.dtype), one, two, np.array(spread, np.int64), rounding)


def field_count(level: Level, left: Side, right: Side) -> int:
    """How many fields images have, but for inputs."""
    largest = (
        (
            step.ends,
            torch.maximum(left.variances[step.met].max(), right.variances[step.met].max())[None],
        )
        for step in level.operations
        if step.ends
    )
    return sum(len(ends(q)) for ends, q in largest)


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
    def coarse_pairs(self) -> tuple[Pairs, ...]:
        """The pairs of pixels that each level leaves for the next."""
        return (*(level.pairs for level in self.levels[1:]), self.levels[-1].pairs)


def program(layers: tuple[AbstractLayer, ...], shape: tuple[int, ...]) -> TileProgram:
    """The operations of the layers as far as they say their fused form: all of them if they are of vectors, else up to
    where an image becomes a vector, or, once it got smaller, up to the first layer that says none.

    >>> from ntkexp.layer.affine import Dense
    >>> from ntkexp.layer.pointwise import ReLU
    >>> found = program((Dense(features=3), ReLU(), Dense(features=1)), (2,))
    >>> [KINDS[operation.kind] for level in found.levels for operation in level.operations]
    ['bend', 'weigh']
    """
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
    met = count()  # each that meets variances has its number among them
    operations = tuple(replace(each, met=next(met)) if each.ends else each for each in operations)
    if len(shape) == 1:
        if not next(met):
            raise NoFusedForm("a linear network")
        return TileProgram(
            (Level(sizes, operations=joined(operations, {0})),), shape[0], None, (), before
        )
    found = [
        replace(one, operations=joined(one.operations, {0, *one.arrivals}))
        for one in levels((*operations, Operation(CLEAR, 0)), sizes)
    ]
    last, end, rest, rest_shape = layers[known], None, layers[known:], before
    end_pairs = base.need(rest, Pairs((), ()), before)
    if last.averages and base.says_itself(last, "averages"):
        end_pairs = last.need(Pairs((), ()), before)
        end, rest, rest_shape = last, layers[known + 1 :], last.shape(before)
    else:  # the tiles of the last level are kept
        whole = coarsen(0, [Coarse.every(n, 1) for n in found[-1].sizes])
        found[-1] = replace(found[-1], coarsenings=(whole,))
    # The pairs that each level needs, of those wanted at the end, in an image of three axes.
    missing = 3 - len(end_pairs.pixels)
    pairs = Pairs((1,) * missing + end_pairs.pixels, ((0,),) * missing + end_pairs.offsets)
    found[-1] = replace(found[-1], pairs=pairs)
    for k in range(len(found) - 2, -1, -1):
        finer = (
            pairs_before(each.coarse, found[k + 1].pairs, found[k].sizes)
            for each in found[k].coarsenings
        )
        found[k] = replace(found[k], pairs=reduce(Pairs.union, finer))
    return TileProgram(tuple(found), shape[0], end, rest, rest_shape)
