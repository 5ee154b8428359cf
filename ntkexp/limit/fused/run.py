"""A block by the fused engine: sub-blocks on threads, then the layers after the image in torch.

In float32 it is as exact as float32 is: on networks of depth 5 its kernels are off by up to 2e-6, relative.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntkexp.layer import chain
from ntkexp.layer.cross import Cross
from ntkexp.layer.pairs import Pairs
from ntkexp.layer.pointwise import ROUNDING
from ntkexp.limit.fused.images import images
from ntkexp.limit.fused.program import Program
from ntkexp.limit.fused.vectors import vectors
from ntkexp.limit.network import Kernels, Network, Side
from ntkexp.limit.recursion import cuts, symmetric

Array = np.ndarray[Any, Any]
IMAGES, VECTORS = 8, 256
"""Examples on each side of a sub-block: few enough for a core's second cache."""


def kernels(program: Program, net: Network, left: Side, right: Side, same: bool, threads: int | None) -> Kernels:
    """Both kernels of a block."""
    work = of_images if len(net.shape) > 1 else of_vectors
    nngp, ntk = work(program, left, right, same, threads or torch.get_num_threads())
    if same:
        nngp, ntk = symmetric(nngp), symmetric(ntk)
    start = Cross(nngp, ntk, Pairs((), ()), left.variances, right.variances, same, program.met)
    end = chain.push(program.rest, start, program.rest_shape)
    return end.nngp, end.ntk


def of_images(program: Program, left: Side, right: Side, same: bool, threads: int) -> Kernels:
    """Means over pixels of the last tiles."""
    rows, columns = program.sizes
    pixels = rows * columns
    apart = np.array([1, 1] if program.equal else [rows, columns])
    operations, weights = tables(program, left.x.dtype)
    one, two = (fields(program, side) for side in (left, right))
    out = np.zeros((2, len(left.x), len(right.x)))

    def sub_block(row: slice, column: slice) -> None:
        part = out[:, row, column]
        images(
            operations,
            weights,
            program.registers,
            one[row],
            two[column],
            left.x.shape[1],
            apart,
            rows,
            columns,
            *program.reach,
            same and row == column,
            rounding(weights),
            part,
        )

    in_threads(sub_block, len(left.x), len(right.x), IMAGES, same, threads)
    share = 1 / (pixels if program.equal else pixels**2)
    nngp, ntk = (torch.from_numpy(sums * share).to(left.x) for sums in out)
    return nngp, ntk


def of_vectors(program: Program, left: Side, right: Side, same: bool, threads: int) -> Kernels:
    """The recursion on every number of a matrix."""
    operations, weights = tables(program, left.x.dtype)
    nngp = (left.x @ right.x.t() / left.x.shape[1]).numpy()
    ntk = np.zeros_like(nngp)
    one, two = (roots(program, side) for side in (left, right))

    def sub_block(row: slice, column: slice) -> None:
        part = (nngp[row, column], ntk[row, column])
        across = np.ascontiguousarray(two[column].T)
        vectors(
            operations, weights, program.registers, one[row], across, same and row == column, rounding(weights), *part
        )

    in_threads(sub_block, len(left.x), len(right.x), VECTORS, same, threads)
    return torch.from_numpy(nngp), torch.from_numpy(ntk)


def in_threads(
    work: Callable[[slice, slice], None], rows: int, columns: int, size: int, same: bool, threads: int
) -> None:
    """Every sub-block once; where the sides are the same, those on and above the diagonal."""
    places = [
        (row, column)
        for row in cuts(rows, size)
        for column in cuts(columns, size)
        if not same or column.start >= row.start
    ]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, row, column) for row, column in places]:
            done.result()


def tables(program: Program, dtype: torch.dtype) -> tuple[Array, Array]:
    """Operations and their weights as arrays; `met` counts fields."""
    operations = [
        (step.kind, step.register, step.other, step.reach[1], step.reach[0], 2 * step.met)
        for step in program.operations
    ]
    weights = [(*step.weights, float(step.reach[0] == 1)) for step in program.operations]
    return np.array(operations), torch.tensor(weights, dtype=dtype).numpy()


def fields(program: Program, side: Side) -> Array:
    """What tiles need of images: inputs, and √q and 1/√q at every nonlinear layer, [image, field, pixel]."""
    pixels = side.x.shape[2:].numel()
    inputs = side.x.reshape(*side.x.shape[:2], pixels)
    parts = [inputs, *(root.reshape(len(side.x), 1, pixels) for root in square_roots(program, side))]
    return np.ascontiguousarray(torch.cat(parts, 1).detach().numpy())


def roots(program: Program, side: Side) -> Array:
    """The same of vectors, without inputs, [example, field]."""
    found = list(square_roots(program, side))
    return np.ascontiguousarray(
        torch.stack(found, 1).detach().numpy() if found else side.x.new_zeros(len(side.x), 0).numpy()
    )


def square_roots(program: Program, side: Side) -> list[Tensor]:
    """√q and 1/√q, zero where q is."""
    both = []
    for variance in side.variances[: program.met]:
        root = variance.sqrt()
        both += [root, torch.where(root > 0, 1 / root, 0.0)]
    return both


def rounding(weights: Array) -> Any:
    """How near to one a correlation counts as one."""
    return weights.dtype.type(ROUNDING * np.finfo(weights.dtype).eps)
