"""The kernels of an infinitely wide network, as a function: block by block, in bounded memory, each by the engine that
suits it.

The places of the blocks follow from shapes alone, and each block from its own examples: they can be computed in any
order, by any process, and again after a kill, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ntkexp.covariance.covariance import split_portions
from ntkexp.covariance.pairs import NoFusedForm, Unresolved
from ntkexp.layer.spec import Spec, every_layer, parse_layers
from ntkexp.limit import network as limit_network
from ntkexp.limit.fused.program import program
from ntkexp.limit.near import all_from_distances, resolves, with_near_pairs
from ntkexp.limit.network import Kernels, Network, Side, cuts, network
from ntkexp.mistake import Mistake, in_short, nearest

# --- An engine computes a block: which one is chosen by what it knows and by shapes, never by clocks.


ENGINES = ("auto", "torch", "fused")
Engine: TypeAlias = Literal["auto", "torch", "fused"]
Run: TypeAlias = Callable[[Side, Side, bool], Kernels]
"""Two sides, and whether they are the same ↦ the kernels of a block, whose entries are finite."""
ENOUGH = 3e7  # pairs of pixels times layers: a tenth of a second in torch, against the second that numba takes to load


def engine_of(
    engine: Engine, net: Network, x: Tensor, pairs: int, memory_gb: float, threads: int | None
) -> Run:
    """The requested engine, or the faster one for this number of pairs of examples."""
    if not isinstance(engine, str) or engine not in ENGINES:
        raise Mistake(
            f"engine={engine} is none of {', '.join(ENGINES)}{nearest(str(engine), ENGINES)}"
        )
    by_torch = partial(limit_network.kernels, net, memory_gb=memory_gb)
    if engine == "torch" or (engine == "auto" and net.work * pairs < ENOUGH):
        return by_torch
    # What the fused engine does not do, whatever the layers are; then whether it knows the layers.
    scales = [scale for layer in every_layer(net.layers) for _, scale in layer]
    if x.device.type != "cpu" or x.dtype not in {torch.float32, torch.float64}:
        reason = f"it takes float32 or float64 on a CPU, not {x.dtype} on {x.device.type}"
    elif x.requires_grad or any(
        isinstance(scale, Tensor) and scale.requires_grad for scale in scales
    ):
        reason = "it has no derivatives"
    else:
        try:
            fused_program = program(net.layers, net.shape)
        except NoFusedForm as missing:
            reason = f"{missing} has no fused form"
        else:
            from ntkexp.limit.fused.run import kernels as fused_kernels  # noqa: PLC0415  numba loads slowly

            threads = threads or torch.get_num_threads()
            return partial(fused_kernels, fused_program, net, threads=threads, memory_gb=memory_gb)
    if engine == "fused":
        raise Mistake(f"engine=fused: {reason}; choose torch")
    return by_torch


WORK = 2**32  # pairs of pixels times layers in a block: seconds to a minute
SIDES = (16, 2048)

__all__ = ["BlockSlices", "KernelBlock", "block_slices", "blocks", "compute", "network"]


@dataclass(frozen=True)
class BlockSlices:
    """A block has this place; the rows and columns of a `same` block are the same examples."""

    rows: slice
    columns: slice
    same: bool


@dataclass(frozen=True)
class KernelBlock:
    """Both kernels are known at a place."""

    place: BlockSlices
    nngp: Float[Tensor, "row column"]
    ntk: Float[Tensor, "row column"]

    @property
    def mirrored(self) -> KernelBlock:
        """The block on the other side of the diagonal is this one, transposed."""
        place = BlockSlices(self.place.columns, self.place.rows, self.place.same)
        return KernelBlock(place, self.nngp.t(), self.ntk.t())


def block_slices(
    net: Network, rows: int, columns: int | None, side: int | None = None
) -> list[BlockSlices]:
    """The places of all blocks, row by row; of a symmetric kernel (`columns` is None) those on and above the diagonal.

    >>> from ntkexp.layer.affine import Dense
    >>> net = network((Dense(features=1),), (2,))
    >>> [(place.rows, place.columns) for place in block_slices(net, 5, None, side=3)][:2]
    [(slice(0, 3, None), slice(0, 3, None)), (slice(0, 3, None), slice(3, 5, None))]
    """
    # What is done once per example costs little beside a block, and little is lost with a block.
    least, most = SIDES
    size = side or min(most, max(least, isqrt(WORK // net.work)))
    return [
        BlockSlices(row, column, columns is None and row == column)
        for row in cuts(rows, size)
        for column in cuts(rows if columns is None else columns, size)
        if columns is not None or column.start >= row.start
    ]


def compute(
    net: Network,
    place: BlockSlices,
    x1: Float[Tensor, "row *shape"],
    x2: Float[Tensor, "column *shape"] | None = None,
    *,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
) -> KernelBlock:
    """Compute one block of both kernels between `x1` and `x2` (or `x1` itself), by the engine that suits it, in about
    `memory_gb`.
    """
    left = net.side(x1[place.rows])
    right = left if place.same else net.side((x1 if x2 is None else x2)[place.columns])
    run = engine_of(engine, net, left.x, len(left.x) * len(right.x), memory_gb, threads)
    try:
        kernels = with_near_pairs(net, left, right, place.same, run(left, right, place.same))
    except Unresolved:
        if not resolves(net):
            raise
        kernels = all_from_distances(net, left, right, place.same)
    return KernelBlock(place, *kernels)


def blocks(
    net: Network,
    x1: Float[Tensor, "row *shape"],
    x2: Float[Tensor, "column *shape"] | None = None,
    *,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
    side: int | None = None,
) -> Iterator[KernelBlock]:
    """Compute all blocks of both kernels, one at a time; `side` is how many examples long they are, if not as long as
    usual.
    """
    for place in block_slices(net, len(x1), None if x2 is None else len(x2), side):
        yield compute(net, place, x1, x2, memory_gb=memory_gb, engine=engine, threads=threads)


MOST = 1e9  # GB


class InfiniteKernels(NamedTuple):
    """The kernels of an infinitely wide network, between the examples of two sides."""

    nngp: Float[Tensor, "row column"]  # of its outputs before training
    ntk: Float[Tensor, "row column"]  # by which it is trained


def infinite_kernel(
    spec: Spec,
    x1: Shaped[Tensor, "..."],
    x2: Shaped[Tensor, "..."] | None = None,
    *,
    memory_gb: float = 4.0,
    engine: Engine = "auto",
    threads: int | None = None,
) -> InfiniteKernels:
    """The kernels of layers that are written down; `ntkexp.infinite_kernel` says what they are, and reads modules too.

    Without x2 the examples are paired with themselves, and where one meets itself nothing is rounded that is 1 by
    definition. Beside its result, a call takes up to `memory_gb`.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> nngp, ntk = infinite_kernel([{"layer": "Dense", "features": 1, "b_std": 1.0}], x)
    >>> nngp
    tensor([[1.5000, 1.0000],
            [1.0000, 3.0000]], dtype=torch.float64)
    """
    refuse_unfit(x1, x2, memory_gb)
    if threads is not None and (not isinstance(threads, int) or not 0 < threads < MOST):
        raise Mistake(f"threads={in_short(threads)}: it takes a whole number > 0")
    net = network(parse_layers(spec), tuple(x1.shape[1:]))
    shape = (len(x1), len(x1 if x2 is None else x2))
    side = (
        max(shape) if len(net.shape) == 1 else None
    )  # beside its result, a block of vectors takes next to nothing
    nngp, ntk = x1.new_empty(shape), x1.new_empty(shape)
    for block in blocks(
        net, x1, x2, memory_gb=memory_gb, engine=engine, threads=threads, side=side
    ):
        if block.nngp.shape == shape:
            return InfiniteKernels(block.nngp, block.ntk)
        for part in (block, block.mirrored) if x2 is None else (block,):
            nngp[part.place.rows, part.place.columns] = part.nngp
            ntk[part.place.rows, part.place.columns] = part.ntk
    return InfiniteKernels(nngp, ntk)


def refuse_unfit(x1: Tensor, x2: Tensor | None, memory_gb: float) -> None:
    """Inputs are finite numbers, of one shape."""
    if not isinstance(memory_gb, int | float) or not 0 < memory_gb < MOST:
        raise Mistake(
            f"memory_gb={in_short(memory_gb)}: it takes a number > 0, and the machine has less than {MOST:g}"
        )
    for name, x in (("x1", x1), *(() if x2 is None else (("x2", x2),))):
        if not isinstance(x, Tensor):
            raise Mistake(f"{name} is a {type(x).__name__}; give a tensor [example, …]")
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.is_quantized:
            raise Mistake(
                f"{name} is nested, sparse, quantized or without numbers; give a plain tensor [example, …]"
            )
        if x.dim() < 2 or not x.is_floating_point():
            raise Mistake(
                f"{name} is {x.dtype} of shape {list(x.shape)}; it takes floating numbers [example, …]"
            )
        if x.shape[1:] != x1.shape[1:] or x.dtype != x1.dtype:
            raise Mistake(
                f"x1 has examples of shape {list(x1.shape[1:])} and {x1.dtype}, "
                f"x2 of {list(x.shape[1:])} and {x.dtype}; they are of one kind"
            )
        # The largest entry of each example, or what is not finite there.
        if x[:1].numel():
            parts = split_portions(x.detach().flatten(1), x[0].numel())
            sizes = torch.cat([torch.maximum(part.amax(1), -part.amin(1)) for part in parts])
        else:
            sizes = x.detach().flatten(1).sum(1)
        kind = torch.finfo(sizes.dtype)
        tiny = (sizes > 0) & (
            sizes < (kind.tiny / kind.eps) ** 0.5
        )  # whose squares are no normal numbers
        for odd, what, advice in (
            (~sizes.isfinite(), "has entries that are not finite, the first", ""),
            (tiny, "is so small that its squares lose digits,", "; scale it up"),
        ):
            if odd.any():
                raise Mistake(f"{name} {what} in example {int(odd.nonzero()[0])}{advice}")
