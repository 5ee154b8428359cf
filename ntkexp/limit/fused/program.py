"""Translate layers into operations on bands, and into tables that compiled loops read.

A band holds both kernels, K (NNGP) and Θ (tangent), of two examples for one offset
between their pixels. A register is a buffer for one band. A field is a function of the
variance at each pixel.

Strides and pools make images smaller. A level contains all operations on images of one
size. At each moment, a register holds an image of one size, and no operation reads
registers of two sizes. So each level can be completed before the next, coarser one."""

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
from ntkexp.layer.base import AbstractLayer, LayerChain
from ntkexp.limit.network import Side
from ntkexp.shapes import Shape

__all__ = ["KINDS", "BandProgram", "program"]

Array = np.ndarray[Any, Any]
Sizes = tuple[int, int, int]
NO_PAIRS = Pairs((), ())
UNEQUAL_BRANCHES = "a layer whose branches get smaller in different steps"


@dataclass(frozen=True)
class Level:
    """The operations on images of one size. They compute kernels at the pixel pairs
    `pairs`.

    The registers `arrivals` hold averages from the previous, finer level. The first
    level starts with the inputs instead. `coarsenings` average registers for the next
    level.
    """

    sizes: Sizes
    arrivals: tuple[int, ...] = ()
    operations: Operations = ()
    coarsenings: Operations = ()
    pairs: Pairs = NO_PAIRS

    @property
    def registers(self) -> int:
        used = base.registers((*self.operations, *self.coarsenings))
        return max(1, *(1 + arrival for arrival in self.arrivals), used)

    @property
    def reach(self) -> Sizes:
        """The largest reach of a window along each axis."""
        deep, down, across = zip(
            (0, 0, 0), *(operation.reach for operation in self.operations), strict=True
        )
        return max(deep), max(down), max(across)

    @property
    def around(self) -> bool:
        """True if any window wraps around the image."""
        return any(operation.kind == WRAP for operation in self.operations)


def levels(operations: Operations, sizes: Sizes) -> tuple[Level, ...]:
    """Assign each operation to the level of its register. A stride or pool moves a
    register to the next level.

    >>> from ntkexp.layer.affine import Conv
    >>> from ntkexp.layer.pointwise import ReLU
    >>> operations = base.fused((Conv(features=2, stride=2), ReLU()), (1, 6, 6), 0, 1)
    >>> fine, coarse = levels(operations, (1, 6, 6))
    >>> len(fine.operations), len(coarse.operations), coarse.sizes
    (2, 1, (1, 3, 3))
    """
    assigned = [Level(sizes)]
    level_of_register = {0: 0}
    for operation in operations:
        here = level_of_register[operation.register]
        level = assigned[here]
        if operation.kind == ADD and level_of_register[operation.other] != here:
            raise NoFusedForm(UNEQUAL_BRANCHES)
        if operation.kind == COPY:
            level_of_register[operation.other] = here
        if operation.kind != COARSEN:
            assigned[here] = replace(level, operations=(*level.operations, operation))
            continue
        # move the register to the next level, and create this level if necessary
        deep, down, across = (len(coarse.members) for coarse in operation.coarse)
        if here + 1 == len(assigned):
            assigned.append(Level((deep, down, across)))
        after = assigned[here + 1]
        if after.sizes != (deep, down, across):
            raise NoFusedForm(UNEQUAL_BRANCHES)
        assigned[here] = replace(level, coarsenings=(*level.coarsenings, operation))
        assigned[here + 1] = replace(
            after, arrivals=(*after.arrivals, operation.register)
        )
        level_of_register[operation.register] = here + 1
    return tuple(assigned)


def joined(operations: Operations, clean: set[int]) -> Operations:
    """Fuse each affine layer with the piecewise-linear activation after it. Drop each
    CLEAR (set to zero outside the image) of a register that is already zero there.

    `clean` contains the registers that are initially zero outside the image.
    """
    merged: list[Operation] = []
    for operation in operations:
        kind = operation.kind
        register = operation.register
        other = operation.other
        if kind == CLEAR and register in clean:
            continue
        last = merged[-1] if merged else None
        if kind == BEND and last and last.kind == WEIGH and last.register == register:
            merged[-1] = replace(operation, reach=last.reach, weights=last.weights)
        else:
            merged.append(operation)
        if kind in CLEANING:
            clean = clean | {register}
        elif kind == COPY:
            clean = clean | {other} if register in clean else clean - {other}
        elif kind != ADD or other not in clean:
            clean = clean - {register}
    return tuple(merged)


# --- Slots: the index of each pixel of a band in the coarse bands, axis by axis
#
# At offset o, the pixels p and p + o belong to coarse pixels p′ and q′, or to none.
# Their kernel is added to pixel p′ of the coarse band with offset q′ − p′. The index of
# this pixel in the array of all coarse bands is a sum over the three axes. A slot is
# the term of one axis in this sum.


NO_SLOT = -1


@dataclass(frozen=True)
class Coarsenings:
    """The registers that a level averages for the next level, as arrays for compiled
    loops."""

    registers: Array
    shares: Array
    """Weight of a pixel pair in the mean, for each register."""
    slots: tuple[Array, Array, Array]
    """For each axis: the slot of each pixel (see above), [coarsening, offset, pixel],
    or `NO_SLOT` if the pixel pair is not averaged."""
    order: Array
    """The order in which `add_to_coarse` reads the pixels of a
    row, [coarsening, pixel]."""


def coarsenings(level: Level, after: Pairs, dtype: Any) -> Coarsenings:
    """Compute the arrays of all coarsenings of a level.
    `after` are the coarse pixel pairs."""
    registers = [step.register for step in level.coarsenings]
    shares = [
        1 / prod(len(coarse.members[0]) ** 2 for coarse in step.coarse)
        for step in level.coarsenings
    ]
    deep, down, across = (slots_along(level, after, axis) for axis in range(3))
    return Coarsenings(
        np.array(registers, np.int64),
        np.array(shares, dtype),
        (deep, down, across),
        addition_order(level),
    )


def slots_along(level: Level, after: Pairs, axis: int) -> Array:
    """Return the slot (defined above) of each pixel along one axis,
    [coarsening, offset, pixel]."""
    # The distances in the array of coarse bands: between successive offsets, and
    # between successive pixels
    band = prod(after.pixels) * prod(
        len(offsets) for offsets in after.offsets[axis + 1 :]
    )
    unit = prod(after.pixels[axis + 1 :])
    pixels = level.sizes[axis]
    fine = level.pairs.offsets[axis]
    by_coarsening = [
        slots(step.coarse[axis], pixels, fine, after.offsets[axis], band, unit)
        for step in level.coarsenings
    ]
    return np.array(by_coarsening, np.int64).reshape(-1, len(fine), pixels)


def addition_order(level: Level) -> Array:
    """Order the pixels of a row: the first members of all coarse pixels, then the
    second members, and so on."""
    columns = level.sizes[2]
    orders = []
    for step in level.coarsenings:
        rank = {
            p: k for members in step.coarse[2].members for k, p in enumerate(members)
        }
        # `sorted` is stable, so members of equal rank stay in the order of their
        # columns
        ranks = [rank.get(p, 0) for p in range(columns)]
        orders.append(sorted(range(columns), key=ranks.__getitem__))
    return np.array(orders, np.int64).reshape(-1, columns)


def slots(
    coarse: Coarse,
    pixels: int,
    fine: Sequence[int],
    coarse_offsets: Sequence[int],
    band: int,
    unit: int,
) -> Array:
    """Return the slot of each pixel along an axis (see above), [offset, pixel].

    `fine` lists the offsets between fine pixels, and `coarse_offsets` the offsets
    between coarse pixels. In the array of coarse bands, successive offsets are `band`
    numbers apart, and successive pixels are `unit` numbers apart.

    >>> slots(Coarse.windows(4, 2), 4, range(4), range(2), band=10, unit=1).tolist()
    [[0, 0, 1, 1], [0, 10, 1, 11], [10, 10, 11, 11], [10, 0, 11, 1]]
    """
    # The coarse pixel p′ that contains each pixel p,
    # and the index of each coarse offset
    coarse_pixel = np.full(pixels, NO_SLOT)
    for number, members in enumerate(coarse.members):
        coarse_pixel[list(members)] = number
    offset_index = np.full(len(coarse.members), NO_SLOT)
    offset_index[list(coarse_offsets)] = np.arange(len(coarse_offsets))
    # The coarse pixel q′ that contains pixel p + o,
    # and the index of the coarse offset q′ − p′
    second = coarse_pixel[(np.arange(pixels) + np.array(fine)[:, None]) % pixels]
    index = offset_index[(second - coarse_pixel) % len(offset_index)]
    has_slot = (coarse_pixel != NO_SLOT) & (second != NO_SLOT) & (index != NO_SLOT)
    return np.where(has_slot, index * band + coarse_pixel * unit, NO_SLOT)


# --- Tables: operations and fields as arrays for compiled loops.
# A field is a function of a variance.


WORDS_PER_OPERATION = 8
WEIGHTS_PER_OPERATION = 8


@dataclass(frozen=True)
class Tables:
    """The operations of a level as rows of a table, and the fields of the left and
    right examples."""

    operations: Array
    """One row for each operation: kind, register, other register, reach along columns,
    rows and planes, index of the first field, index after the last field."""
    weights: Array
    """One row for each operation: the weights s, b, α, β in K ← s K + b and Θ ← s Θ + α
    K + β; then 1 if the window has three rows; then up to three constants."""
    left: Array
    """The fields of the left examples: [image, field, pixel], or [example, field] for
    vectors. In the first level, the inputs of images come before the fields."""
    right: Array
    spread: Array
    """For vectors: the left fields that are copied to every column of a band. All other
    left fields are read as single numbers."""
    rounding: Any
    """If 1 − |ρ| is at most this value, the correlation ρ counts as ±1."""


def tables(level: Level, left: Side, right: Side) -> Tables:
    """Compute the tables of a level for the examples of both sides."""
    sides = [left] if left is right else [left, right]
    # the fields of all nonlinear operations (with `fields_of`), for both sides at once
    fields: list[tuple[torch.Tensor, ...]] = []
    operations = np.zeros((len(level.operations), WORDS_PER_OPERATION), np.int64)
    weights = np.zeros((len(level.operations), WEIGHTS_PER_OPERATION), float)
    spread: list[int] = []
    first = 0
    for k, step in enumerate(level.operations):
        end = first
        if step.fields_of:
            q = torch.cat([side.variances[step.variance_index] for side in sides])
            fields.append(step.fields_of(q))
            end += len(fields[-1])
        operations[k] = (
            step.kind,
            step.register,
            step.other,
            *reversed(step.reach),
            first,
            end,
        )
        numbers = (*step.weights, float(step.reach[1] == 1), *step.constants)
        weights[k, : len(numbers)] = numbers
        # `spread` lists the fields that are copied to every column: all fields except
        # the coefficients of a series, which follow its two fields 1/√q and E σ
        spread += range(first, min(end, first + 2) if step.kind == SERIES else end)
        first = end
    size = len(left.x)
    left_table = fields_of_side(level, left, fields, slice(0, size))
    right_table = left_table
    if left is not right:
        right_table = fields_of_side(level, right, fields, slice(size, None))
    dtype = left_table.dtype
    return Tables(
        operations,
        weights.astype(dtype),
        left_table,
        right_table,
        np.array(spread, np.int64),
        dtype.type(ROUNDING * torch.finfo(left.x.dtype).eps),
    )


def fields_of_side(
    level: Level, side: Side, fields: Sequence[Sequence[torch.Tensor]], rows: slice
) -> Array:
    """Return the table of one side: the numbers of each example that the loops read.
    They are the entries `rows` of all `fields`. If the level begins with input images,
    the inputs come before the fields."""
    x = side.x
    is_vector = x.dim() == 2
    pixels = prod(level.sizes)
    parts = [x.new_zeros(len(x), 0, pixels)]
    if not is_vector and not level.arrivals:
        parts = [x.reshape(*x.shape[:2], pixels)]
    for fields_of_operation in fields:
        parts += [
            field[rows].reshape(len(x), 1, pixels) for field in fields_of_operation
        ]
    table = np.ascontiguousarray(torch.cat(parts, 1).numpy())
    if is_vector:
        return table.reshape(len(x), -1)
    return table


def field_count(level: Level, left: Side, right: Side) -> int:
    """Return the number of fields of an image, not counting inputs."""
    fields = 0
    for step in level.operations:
        if step.fields_of:
            left_variances = left.variances[step.variance_index]
            right_variances = right.variances[step.variance_index]
            largest = torch.maximum(left_variances.max(), right_variances.max())
            fields += len(step.fields_of(largest[None]))
    return fields


@dataclass(frozen=True)
class BandProgram:
    """All operations on bands, from the finest level to the coarsest.

    The layer `end` averages over pixel pairs, and the fused engine computes this mean.
    If `end` is None, the fused engine returns the bands of the last level. In both
    cases, torch then applies the layers `rest` to examples of shape `rest_shape`."""

    levels: tuple[Level, ...]
    channels: int
    end: AbstractLayer | None
    rest: LayerChain
    rest_shape: Shape

    @property
    def coarse_pairs(self) -> tuple[Pairs, ...]:
        """For each level, the pixel pairs of the next level. For the last level, its
        own pixel pairs."""
        return (*(level.pairs for level in self.levels[1:]), self.levels[-1].pairs)


def program(layers: LayerChain, shape: Shape) -> BandProgram:
    """Translate layers into operations on bands.

    For vectors, every layer must have a fused form. For images, the program ends before
    the first layer without a fused form, such as Flatten. This layer or an earlier one
    must make the images smaller, or turn them into vectors. Otherwise raise
    `NoFusedForm`.

    >>> from ntkexp.layer.affine import Dense
    >>> from ntkexp.layer.pointwise import ReLU
    >>> compiled = program((Dense(features=3), ReLU(), Dense(features=1)), (2,))
    >>> [KINDS[operation.kind] for level in compiled.levels for operation in level.operations]
    ['bend', 'weigh']
    """
    planes, rows, columns = (1, 1, 1, *shape[1:])[-3:]
    sizes = (planes, rows, columns)
    operations, rest = fused_prefix(layers, shape, sizes)
    rest_shape = base.shapes(layers[: len(layers) - len(rest)], shape)[-1]
    if len(shape) == 1:
        if not any(operation.fields_of for operation in operations):
            raise NoFusedForm("a linear network")
        level = Level(sizes, operations=joined(operations, {0}))
        return BandProgram((level,), shape[0], None, (), rest_shape)
    by_level = [
        replace(level, operations=joined(level.operations, {0, *level.arrivals}))
        for level in levels((*operations, Operation(CLEAR, 0)), sizes)
    ]
    end: AbstractLayer | None = None
    if rest[0].averages and base.defines_itself(rest[0], "averages"):
        end, *others = rest
        end_pairs = end.input_pairs(NO_PAIRS, rest_shape)
        rest = tuple(others)
        rest_shape = end.shape(rest_shape)
    else:
        end_pairs = base.input_pairs(rest, NO_PAIRS, rest_shape)
        # A coarsening with windows of one pixel stores the bands of the last level.
        unchanged = coarsen(0, [Coarse.strided(n, 1) for n in by_level[-1].sizes])
        by_level[-1] = replace(by_level[-1], coarsenings=(unchanged,))
    return BandProgram(with_pairs(by_level, end_pairs), shape[0], end, rest, rest_shape)


def fused_prefix(
    layers: LayerChain, shape: Shape, sizes: Sizes
) -> tuple[Operations, LayerChain]:
    """Return the operations of the longest prefix of layers that have a fused form, and
    the remaining layers. `variance_index` numbers the nonlinear operations."""
    operations: Operations = ()
    fused_layers = 0
    rest_shape = shape
    try:
        for layer in layers:
            extended = (*operations, *base.fused((layer,), rest_shape, 0, 1))
            levels(extended, sizes)
            operations = extended
            rest_shape = layer.shape(rest_shape)
            fused_layers += 1
    except NoFusedForm:
        if len(shape) == 1 or layers[fused_layers].shape(rest_shape)[1:] == shape[1:]:
            raise
    numbers = count()
    numbered = tuple(
        replace(operation, variance_index=next(numbers))
        if operation.fields_of
        else operation
        for operation in operations
    )
    return numbered, layers[fused_layers:]


def with_pairs(by_level: list[Level], end_pairs: Pairs) -> tuple[Level, ...]:
    """Set the pixel pairs of each level, from the last one back to the first."""
    # Pad the last level's pairs to three axes.
    missing = 3 - len(end_pairs.pixels)
    pairs = Pairs(
        (1,) * missing + end_pairs.pixels, ((0,),) * missing + end_pairs.offsets
    )
    by_level[-1] = replace(by_level[-1], pairs=pairs)
    for k in range(len(by_level) - 2, -1, -1):
        coarser = by_level[k + 1].pairs
        sizes = by_level[k].sizes
        finer = (
            pairs_before(step.coarse, coarser, sizes)
            for step in by_level[k].coarsenings
        )
        by_level[k] = replace(by_level[k], pairs=reduce(Pairs.union, finer))
    return tuple(by_level)
