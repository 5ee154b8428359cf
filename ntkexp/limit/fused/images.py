"""Kernels of images: for one offset after the other, a tile for every pair of images.

What a pair needs of each image, inputs and functions of the variance at every nonlinear layer, is laid out once per
offset, one axis after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ntkexp.limit.fused.jit import compiled
from ntkexp.limit.fused.layout import halos, length, origins, padded, place, stacked
from ntkexp.limit.fused.loops import total
from ntkexp.limit.fused.tile import walked

Array = np.ndarray[Any, Any]


@compiled
def images(
    operations: Array,
    weights: Array,
    registers: int,
    left: Array,
    right: Array,
    channels: int,
    deeps: Array,
    downs: Array,
    acrosses: Array,
    planes: int,
    rows: int,
    columns: int,
    deep: int,
    down: int,
    across: int,
    around: bool,
    same: bool,
    equal: Any,
    sums: Array,
    kept: Array,
) -> None:
    """Sums over pixels of K and Θ into sums [2, left, right], over the offsets that are combined of three lists.

    A side is [image, field, pixel]. Unless it is empty, kept [2, left, right, deep, plane, down, row, across, column]
    gets both as they are. If both sides are the same, only pairs on and above the diagonal are computed.
    """
    stride, fields, first_count, second_count = (
        length(columns, across, around),
        left.shape[1],
        left.shape[0],
        right.shape[0],
    )
    plane = length(rows, down, around) * stride
    size = padded(length(planes, deep, around) * plane)
    margin = padded(deep * plane + down * stride + across)
    ones, twos = first_count * fields, second_count * fields
    work = np.zeros((2 * registers + 4, margin + size + margin), left.dtype)
    # Along each axis, first columns alone, then rows of them, then planes.
    flat1, flat2 = left.reshape(left.size), right.reshape(right.size)
    filled = np.ones(planes * rows * columns, left.dtype)
    band, sheet = planes * rows * stride, planes * plane
    bands1, bands2 = np.zeros(ones * band, left.dtype), np.zeros(twos * band, left.dtype)
    one, two = np.zeros(ones * size, left.dtype), np.zeros(twos * size, left.dtype)
    banded, inside = np.zeros(band, left.dtype), np.zeros(size, left.dtype)
    flat = planes == 1 and deep == 0  # rows are all there is to tiles
    sheets1, sheets2, sheeted, pitch = one, two, inside, size
    if not flat:
        sheets1, sheets2 = np.zeros(ones * sheet, left.dtype), np.zeros(twos * sheet, left.dtype)
        sheeted, pitch = np.zeros(sheet, left.dtype), plane
    halo, numbers = np.zeros((2, 0), np.int64), np.zeros(0, left.dtype)
    for k2 in range(acrosses.shape[0]):
        o2 = acrosses[k2]
        stacked(flat1, bands1, ones * planes * rows, columns, 1, o2, 0, across, around, stride)
        stacked(flat2, bands2, twos * planes * rows, columns, 1, o2, o2, across, around, stride)
        stacked(filled, banded, planes * rows, columns, 1, o2, 0, across, around, stride)
        for k1 in range(downs.shape[0]):
            o1 = downs[k1]
            stacked(bands1, sheets1, ones * planes, rows, stride, o1, 0, down, around, pitch)
            stacked(bands2, sheets2, twos * planes, rows, stride, o1, o1, down, around, pitch)
            stacked(banded, sheeted, planes, rows, stride, o1, 0, down, around, pitch)
            for k0 in range(deeps.shape[0]):
                o0 = deeps[k0]
                if not flat:
                    stacked(sheets1, one, ones, planes, plane, o0, 0, deep, around, size)
                    stacked(sheets2, two, twos, planes, plane, o0, o0, deep, around, size)
                    stacked(sheeted, inside, 1, planes, plane, o0, 0, deep, around, size)
                if around:
                    halo = halos(
                        origins(planes, o0, deep, around),
                        origins(rows, o1, down, around),
                        origins(columns, o2, across, around),
                    )
                for i in range(first_count):
                    for j in range(i if same else 0, second_count):
                        first, second = i * fields * size, j * fields * size
                        multiplied(one, two, first, second, channels, work[0], margin, size)
                        work[1, :] = 0
                        # An example and itself, pixel by pixel: every correlation is one.
                        itself = same and i == j and o0 == 0 and o1 == 0 and o2 == 0
                        walked(
                            operations,
                            weights,
                            work,
                            margin,
                            size,
                            stride,
                            plane,
                            weights.dtype.type(2) if itself else equal,
                            one,
                            two,
                            first + channels * size,
                            second + channels * size,
                            size,
                            size,
                            inside,
                            halo,
                            numbers,
                        )
                        if kept.shape[0]:
                            out = kept[:, i, j, k0, :, k1, :, k2, :]
                            stored(work, margin, deep, down, across, o0, o1, o2, around, out)
                        else:
                            sums[0, i, j] += total(work[0], margin, size)
                            sums[1, i, j] += total(work[1], margin, size)


@compiled
def multiplied(
    one: Array, two: Array, first: int, second: int, channels: int, target: Array, margin: int, size: int
) -> None:
    """The mean over channels of products of inputs."""
    start, count = np.uintp(margin), np.uintp(size)
    share = target.dtype.type(1) / target.dtype.type(channels)
    a, b = np.uintp(first), np.uintp(second)
    for j in range(count):
        target[j + start] = share * one[a + j] * two[b + j]
    for channel in range(1, channels):
        a, b = np.uintp(first + channel * size), np.uintp(second + channel * size)
        for j in range(count):
            target[j + start] += share * one[a + j] * two[b + j]


@compiled
def stored(
    work: Array,
    margin: int,
    deep: int,
    down: int,
    across: int,
    o0: int,
    o1: int,
    o2: int,
    around: bool,
    out: Array,
) -> None:
    """The pixels of a tile, without what lies between them, into out [2, plane, row, column]."""
    _, planes, rows, columns = out.shape
    stride = length(columns, across, around)
    plane = length(rows, down, around) * stride
    for z in range(planes):
        for y in range(rows):
            here = margin + place(z, planes, o0, deep, around) * plane + place(y, rows, o1, down, around) * stride
            for x in range(columns):
                there = here + place(x, columns, o2, across, around)
                out[0, z, y, x], out[1, z, y, x] = work[0, there], work[1, there]
