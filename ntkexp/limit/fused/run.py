"""A block by the fused engine: sub-blocks on threads, then the layers that it does not know in torch.

In float32 it is as exact as float32 is: on networks of depth 5 its kernels are off by up to 1e-6, relative.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any

import numpy as np
import torch

from ntkexp.covariance.cross import Cross
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import chain
from ntkexp.limit.finite import finite
from ntkexp.limit.fused import tables
from ntkexp.limit.fused.images import images
from ntkexp.limit.fused.parts import SubBlock, in_threads, laid_out, places, shared
from ntkexp.limit.fused.program import TileProgram
from ntkexp.limit.fused.slots import Departures, departures
from ntkexp.limit.fused.strips import of_vectors
from ntkexp.limit.fused.tables import Tables
from ntkexp.limit.network import Kernels, Network, Side
from ntkexp.limit.torch_engine import COPIES, symmetric

Array = np.ndarray[Any, Any]
TABLES = 8
"""Into so many parts memory goes, of which the tables of a side take one."""
NUMBERS = 2**22
"""Numbers of each kernel in a sub-block that are kept between levels."""


def kernels(
    program: TileProgram, net: Network, left: Side, right: Side, same: bool, threads: int, memory_gb: float
) -> Kernels:
    """Both kernels of a block."""
    if len(net.shape) == 1:
        return of_vectors(program, left, right, same, threads)
    numbers = left.x[0].numel() + sum(tables.count(one, left, right) * prod(one.sizes) for one in program.levels)
    most = max(1, int(memory_gb * 1e9 / (TABLES * numbers * left.x.element_size())))
    if max(len(left.x), len(right.x)) > most:
        return in_parts(program, net, left, right, same, threads, memory_gb, most)
    nngp, ntk = of_images(program, left, right, same, threads, memory_gb / threads)
    if same:
        nngp, ntk = symmetric(nngp), symmetric(ntk)
    return finite(rest(program, left, right, (nngp, ntk), same) if program.end else (nngp, ntk))


def in_parts(
    program: TileProgram,
    net: Network,
    left: Side,
    right: Side,
    same: bool,
    threads: int,
    memory_gb: float,
    most: int,
) -> Kernels:
    """The kernels of a block part by part, of no more examples a side than there is room for in tables."""
    whole = tuple(left.x.new_empty(len(left.x), len(right.x)) for _ in range(2))
    for row, column in places(left, right, most, same):
        itself = same and row == column
        found = kernels(program, net, left.part(row), right.part(column), itself, threads, memory_gb)
        for values, part in zip(whole, found, strict=True):
            values[row, column] = part
            if same and not itself:
                values[column, row] = part.t()
    return whole[0], whole[1]


def of_images(program: TileProgram, left: Side, right: Side, same: bool, threads: int, memory_gb: float) -> Kernels:
    """What the end asks for of the last tiles, or without one the kernels, the other layers being done in torch on one
    sub-block after the other.
    """
    found = [tables.of_images(level, left, right) for level in program.levels]
    size = shared(left, right, sub_block(program, found, memory_gb), threads)
    parts, last = places(left, right, size, same), program.levels[-1].pairs
    leaving = [departures(*ends, found[0].left.dtype) for ends in zip(program.levels, program.departed, strict=True)]
    nngp, ntk = (left.x.new_zeros(len(left.x), len(right.x)) for _ in range(2))

    def tiles(place: SubBlock) -> Kernels:
        sums = np.zeros((2, len(left.x[place[0]]), len(right.x[place[1]])))
        kept = through(program, found, leaving, same and place[0] == place[1], place, sums)
        first, second = torch.from_numpy(sums / last.count).to(left.x) if program.end else pixel_pairs(program, kept)
        return first, second

    for (row, column), ends in zip(parts, in_threads(tiles, parts, threads, threads), strict=True):
        sides, itself = (left.part(row), right.part(column)), same and row == column
        nngp[row, column], ntk[row, column] = ends if program.end else rest(program, *sides, ends, itself)
    return nngp, ntk


def sub_block(program: TileProgram, found: Sequence[Tables], memory_gb: float) -> int:
    """How many images there is room for on each side of a sub-block, with all that departs from two levels."""
    departing = [
        2 * len(one.departures) * after.count for one, after in zip(program.levels, program.departed, strict=True)
    ]
    numbers = min(NUMBERS, int(memory_gb * 1e9 / (COPIES * found[0].left.itemsize)))
    return max(1, min(laid_out(found, memory_gb), isqrt(2 * numbers // max(1, *departing))))


def through(
    program: TileProgram,
    found: Sequence[Tables],
    leaving: Sequence[Departures],
    same: bool,
    place: SubBlock,
    sums: Array,
) -> Array:
    """The tiles of a sub-block through all levels, to their sums, or to the pixels of the last."""
    row, column = place
    kept = np.zeros((0,) * 5, found[0].left.dtype)
    for level, table, going, after in zip(program.levels, found, leaving, program.departed, strict=True):
        target = np.zeros((len(going.registers), *sums.shape, after.count if len(going.registers) else 0), kept.dtype)
        images(
            table.operations,
            table.weights,
            level.registers,
            table.left[row],
            table.right[column],
            0 if level.arrivals else program.channels,
            tuple(np.array(offsets) for offsets in level.pairs.offsets),
            level.sizes,
            level.reach,
            level.around,
            same,
            table.rounding,
            np.array(level.arrivals, np.int64),
            kept,
            (going.registers, going.shares, going.slots, going.order),
            target,
            sums,
        )
        kept = target
    return kept


def pixel_pairs(program: TileProgram, kept: Array) -> Kernels:
    """What was kept of the last level, as pairs of pixels of an image with as many axes as it has."""
    pairs = program.levels[-1].pairs
    axes = [n for kept, n in zip(pairs.offsets, pairs.pixels, strict=True) for n in (len(kept), n)]
    tiles = (
        torch.from_numpy(kept[0]).view(2, *kept.shape[2:4], *axes[::2], *axes[1::2]).permute(0, 1, 2, 3, 6, 4, 7, 5, 8)
    )
    first, second = tiles.reshape(*tiles.shape[:3], *axes[-2 * len(program.rest_shape[1:]) :])
    return first, second


def rest(program: TileProgram, left: Side, right: Side, found: Kernels, same: bool) -> Kernels:
    """The kernels after the layers that are left, in torch."""
    wanted = chain.need(program.rest, Pairs((), ()), program.rest_shape)
    start = Cross(*found, wanted, left.variances, right.variances, same, program.met)
    end = chain.push(program.rest, start, program.rest_shape)
    return end.nngp, end.ntk
