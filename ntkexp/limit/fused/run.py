"""A block by the fused engine: sub-blocks on threads, then the layers that it does not know in torch.

In float32 it is as exact as float32 is: on networks of depth 5 its kernels are off by up to 1e-6, relative.
"""

from __future__ import annotations

from functools import partial
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntkexp.covariance.cross import Cross
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer import chain
from ntkexp.limit.fused import tables
from ntkexp.limit.fused.images import images
from ntkexp.limit.fused.parts import SubBlock, in_threads, laid_out, places, shared
from ntkexp.limit.fused.program import TileProgram
from ntkexp.limit.fused.tables import Tables
from ntkexp.limit.fused.vectors import vectors
from ntkexp.limit.network import Kernels, Network, Side
from ntkexp.limit.torch_engine import COPIES, cuts, symmetric

Array = np.ndarray[Any, Any]
VECTORS = 256
"""Vectors on each side of a sub-block, whose matrix stays in a cache."""
TABLES = 8
"""Into so many parts memory goes, of which the tables of a side take one."""
NUMBERS = 2**22
"""Pairs of pixels in a sub-block whose tiles are kept."""


def kernels(
    program: TileProgram, net: Network, left: Side, right: Side, same: bool, threads: int, memory_gb: float
) -> Kernels:
    """Both kernels of a block."""
    if len(net.shape) == 1:
        return of_vectors(program, left, right, same, threads)
    numbers = tables.count(program, left, right) * left.x.shape[2:].numel()
    most = max(1, int(memory_gb * 1e9 / (TABLES * numbers * left.x.element_size())))
    if max(len(left.x), len(right.x)) > most:
        return in_parts(program, net, left, right, same, threads, memory_gb, most)
    memory_gb /= threads
    if program.end is None:
        return of_pixels(program, left, right, same, threads, memory_gb)
    pairs = full(program.end.need(Pairs((), ()), (left.x.shape[1], *left.x.shape[2:])))
    return of_sums(program, pairs, left, right, same, threads, memory_gb)


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


def of_sums(
    program: TileProgram, pairs: Pairs, left: Side, right: Side, same: bool, threads: int, memory_gb: float
) -> Kernels:
    """The kernels by means over these pairs of pixels of the last tiles, then by the layers of vectors."""
    sums = np.zeros((2, len(left.x), len(right.x)))
    nothing = left.x.new_zeros((0,) * 9).numpy()
    table = tables.of_images(program, left, right)
    walk = partial(walked, program, table, pairs, same)
    parts = places(left, right, shared(left, right, laid_out(table, memory_gb), threads), same)
    for _ in in_threads(lambda place: walk(place, sums[:, *place], nothing), parts, threads, len(parts)):
        pass
    nngp, ntk = torch.from_numpy(sums / pairs.count).to(left.x)
    if same:
        nngp, ntk = symmetric(nngp), symmetric(ntk)
    return rest(program, left, right, (nngp, ntk), Pairs((), ()), same)


def of_pixels(program: TileProgram, left: Side, right: Side, same: bool, threads: int, memory_gb: float) -> Kernels:
    """The kernels by the last tiles themselves, then by the other layers in torch, one sub-block after the other."""
    pairs = chain.need(program.rest, Pairs((), ()), program.rest_shape)
    whole = full(pairs)
    axes = [n for kept, n in zip(whole.offsets, whole.pixels, strict=True) for n in (len(kept), n)]
    table = tables.of_images(program, left, right)
    walk = partial(walked, program, table, whole, same)
    numbers = min(NUMBERS, int(memory_gb * 1e9 / (COPIES * left.x.element_size())))
    most = max(1, min(laid_out(table, memory_gb), isqrt(numbers // pairs.count)))
    size = shared(left, right, most, threads)
    nngp, ntk = (left.x.new_zeros(len(left.x), len(right.x)) for _ in range(2))

    def tiles(place: SubBlock) -> Tensor:
        counts = (len(left.x[place[0]]), len(right.x[place[1]]))
        kept = left.x.new_zeros(2, *counts, *axes)
        walk(place, np.zeros((2, *counts)), kept.numpy())
        return kept.view(2, *counts, *axes[-2 * len(pairs.pixels) :])

    parts = places(left, right, size, same)
    for (row, column), kept in zip(parts, in_threads(tiles, parts, threads, threads), strict=True):
        sides, itself = (left.part(row), right.part(column)), same and row == column
        nngp[row, column], ntk[row, column] = rest(program, *sides, (kept[0], kept[1]), pairs, itself)
    return (symmetric(nngp), symmetric(ntk)) if same else (nngp, ntk)


def full(pairs: Pairs) -> Pairs:
    """The same pairs in an image of three axes."""
    missing = 3 - len(pairs.pixels)
    return Pairs((1,) * missing + pairs.pixels, ((0,),) * missing + pairs.offsets)


def walked(
    program: TileProgram, tables: Tables, pairs: Pairs, same: bool, place: SubBlock, sums: Array, kept: Array
) -> None:
    """The tiles of a sub-block, summed up or kept."""
    row, column = place
    images(
        tables.operations,
        tables.weights,
        program.registers,
        tables.left[row],
        tables.right[column],
        program.channels,
        *(np.array(offsets) for offsets in pairs.offsets),
        *program.sizes,
        *program.reach,
        program.around,
        same and row == column,
        tables.rounding,
        sums,
        kept,
    )


def rest(program: TileProgram, left: Side, right: Side, found: Kernels, pairs: Pairs, same: bool) -> Kernels:
    """The kernels after the layers that are left, in torch."""
    start = Cross(*found, pairs, left.variances, right.variances, same, program.met)
    end = chain.push(program.rest, start, program.rest_shape)
    return end.nngp, end.ntk


def of_vectors(program: TileProgram, left: Side, right: Side, same: bool, threads: int) -> Kernels:
    """The kernels by the recursion on every number of a matrix; of a symmetric one, on those on and above the
    diagonal.
    """
    nngp, ntk = (left.x.new_empty(len(left.x), len(right.x)) for _ in range(2))
    for strip in cuts(len(left.x), VECTORS):
        start = strip.start if same else 0
        shown = nngp[strip, start:]
        torch.addmm(shown, left.x[strip], right.x[start:].t(), beta=0, alpha=1 / left.x.shape[1], out=shown)
    whole = (nngp.numpy(), ntk.numpy())
    table = tables.of_vectors(program, left, right)

    def walk(place: SubBlock) -> None:
        row, column = place
        one, two, itself = table.left[row], np.ascontiguousarray(table.right[column].T), same and row == column
        ends = tuple(end[place] for end in whole)
        vectors(
            table.operations, table.weights, program.registers, one, two, table.spread, itself, table.rounding, *ends
        )
        for end, above in zip(whole, ends, strict=True) if same else ():
            end[column, row] = np.triu(above) + np.triu(above, 1).T if itself else above.T

    parts = places(left, right, shared(left, right, VECTORS, threads), same)
    for _ in in_threads(walk, parts, threads, len(parts)):
        pass
    return nngp, ntk
