"""The NNGP kernel and the tangent kernel of an infinitely wide network, computed block by
block in bounded memory.

The division into blocks depends only on shapes, and the entries of a block depend only
on its own examples. Processes can therefore compute blocks in any order, and repeat
them after they were killed, with bitwise equal results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, product
from math import isqrt
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ntkexp.capacity import DEFAULT_MEMORY, MemoryBudget, split_range
from ntkexp.covariance.covariance import split_portions
from ntkexp.covariance.pairs import NoFusedForm, Unresolved
from ntkexp.layer.spec import Spec, every_layer, parse_layers
from ntkexp.limit import network as limit_network
from ntkexp.limit.fused.program import program
from ntkexp.limit.near import all_from_distances, resolves, with_near_pairs
from ntkexp.limit.network import Kernels, Network, Side, network
from ntkexp.mistake import Mistake, in_short, nearest

# --- Engines: each computes the kernels of a block. `auto` chooses by layers and
# shapes, not by timings.


ENGINES = ("auto", "torch", "fused")
Engine: TypeAlias = Literal["auto", "torch", "fused"]
Run: TypeAlias = Callable[[Side, Side, bool], Kernels]
"""An engine. `run(left, right, same)` returns the NNGP kernel and the tangent kernel of
a block. All entries must be finite."""
MIN_FUSED_WORK = 3e7
"""`auto` uses the fused engine if the work (pixel pairs times layers) is at least this.

Torch needs 0.1 s for this work; loading numba takes 1 s.
"""


def fused_obstacle(net: Network, x: Tensor) -> str | None:
    """Return the reason why the fused engine cannot take these inputs or weight scales.
    Return None if it can."""
    if x.device.type != "cpu" or x.dtype not in {torch.float32, torch.float64}:
        return f"it takes float32 or float64 on a CPU, not {x.dtype} on {x.device.type}"
    tensors = [x]
    for layer in every_layer(net.layers):
        tensors += [scale for _, scale in layer if isinstance(scale, Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        return "it has no derivatives"
    return None


def choose_engine(
    engine: Engine,
    net: Network,
    x: Tensor,
    pairs: int,
    budget: MemoryBudget,
    threads: int | None,
) -> Run:
    """Return the requested engine. For `auto`, choose by the work for `pairs` pairs of
    examples.

    Raise if `fused` is requested but does not apply.
    """
    if not isinstance(engine, str) or engine not in ENGINES:
        raise Mistake(
            f"engine={engine} is none of {', '.join(ENGINES)}{nearest(str(engine), ENGINES)}"
        )
    by_torch = partial(limit_network.kernels, net, budget=budget)
    if engine == "torch" or (engine == "auto" and net.work * pairs < MIN_FUSED_WORK):
        return by_torch
    obstacle = fused_obstacle(net, x)
    if obstacle is None:
        try:
            fused_program = program(net.layers, net.shape)
        except NoFusedForm as missing:
            obstacle = f"{missing} has no fused form"
    if obstacle is not None:
        if engine == "fused":
            raise Mistake(f"engine=fused: {obstacle}; choose torch")
        return by_torch
    from ntkexp.limit.fused.run import kernels as fused_kernels  # noqa: PLC0415  numba loads slowly

    threads = threads or torch.get_num_threads()
    return partial(fused_kernels, fused_program, threads=threads, budget=budget)


MAX_BLOCK_WORK = 2**32
"""The largest work in a block (pixel pairs times layers). This work takes seconds to a
minute."""
MIN_LIMIT_BLOCK_SIDE = 16
MAX_LIMIT_BLOCK_SIDE = 2048

__all__ = ["BlockSlices", "KernelBlock", "block_slices", "compute", "network"]


@dataclass(frozen=True)
class BlockSlices:
    """The rows and columns of a block. If `same`, both are the same examples."""

    rows: slice
    columns: slice
    same: bool


@dataclass(frozen=True)
class KernelBlock:
    """The NNGP kernel and the tangent kernel of a block."""

    place: BlockSlices
    nngp: Float[Tensor, "row column"]
    ntk: Float[Tensor, "row column"]

    @property
    def mirrored(self) -> KernelBlock:
        """The transposed block, which lies on the opposite side of the diagonal."""
        place = BlockSlices(self.place.columns, self.place.rows, self.place.same)
        return KernelBlock(place, self.nngp.t(), self.ntk.t())


def block_slices(
    net: Network, rows: int, columns: int | None, side: int | None = None
) -> list[BlockSlices]:
    """Return all blocks row by row. If `columns` is None,
    omit blocks below the diagonal.

    `side` sets the number of examples on each side of a block.

    >>> from ntkexp.layer.affine import Dense
    >>> net = network((Dense(features=1),), (2,))
    >>> [(place.rows, place.columns) for place in block_slices(net, 5, None, side=3)][:2]
    [(slice(0, 3, None), slice(0, 3, None)), (slice(0, 3, None), slice(3, 5, None))]
    """
    # A block is large enough that the work per pair dominates the work per example, and
    # small enough that a kill loses little.
    size = side or min(
        MAX_LIMIT_BLOCK_SIDE,
        max(MIN_LIMIT_BLOCK_SIDE, isqrt(MAX_BLOCK_WORK // net.work)),
    )
    if columns is not None:
        pairs = product(split_range(0, rows, size), split_range(0, columns, size))
        return [BlockSlices(row, column, same=False) for row, column in pairs]
    slices = split_range(0, rows, size)
    pairs_above = combinations_with_replacement(slices, 2)
    return [BlockSlices(row, column, same=row == column) for row, column in pairs_above]


def compute(
    net: Network,
    place: BlockSlices,
    x1: Float[Tensor, " row *shape"],
    x2: Float[Tensor, " column *shape"] | None = None,
    *,
    budget: MemoryBudget = DEFAULT_MEMORY,
    engine: Engine = "auto",
    threads: int | None = None,
) -> KernelBlock:
    """Compute one block of the NNGP kernel and the tangent kernel between `x1` and
    `x2`. Without `x2`, both sides are `x1`. Use about `budget` of memory."""
    left = net.side(x1[place.rows])
    right = left
    if not place.same:
        others = x1 if x2 is None else x2
        right = net.side(others[place.columns])
    pairs = len(left.x) * len(right.x)
    run = choose_engine(engine, net, left.x, pairs, budget, threads)
    try:
        kernels = with_near_pairs(
            net, left, right, place.same, run(left, right, place.same)
        )
    except Unresolved:
        if not resolves(net):
            raise
        kernels = all_from_distances(net, left, right, place.same)
    return KernelBlock(place, *kernels)


MAX_THREADS = 10**9


class InfiniteKernels(NamedTuple):
    """The NNGP kernel and the tangent kernel of an infinitely wide network."""

    nngp: Float[Tensor, "row column"]
    """The covariance of the outputs before training."""
    ntk: Float[Tensor, "row column"]
    """The tangent kernel."""


def infinite_kernel(
    spec: Spec,
    x1: Shaped[Tensor, "..."],
    x2: Shaped[Tensor, "..."] | None = None,
    *,
    budget: MemoryBudget = DEFAULT_MEMORY,
    engine: Engine = "auto",
    threads: int | None = None,
) -> InfiniteKernels:
    """Compute the NNGP kernel and the tangent kernel of a specification of layers.

    The public function `ntkexp.infinite_kernel` documents the arguments,
    and also accepts modules.

    Without `x2`, pair the examples of `x1` with one another. The correlation of an
    example with itself is then exactly 1. In addition to its result, a call uses memory
    up to `budget`.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> nngp, ntk = infinite_kernel([{"layer": "Dense", "features": 1, "b_std": 1.0}], x)
    >>> nngp
    tensor([[1.5000, 1.0000],
            [1.0000, 3.0000]], dtype=torch.float64)
    """
    refuse_unfit(x1, x2)
    is_thread_count = isinstance(threads, int) and 0 < threads < MAX_THREADS
    if threads is not None and not is_thread_count:
        raise Mistake(f"threads={in_short(threads)}: it takes a whole number > 0")
    net = network(parse_layers(spec), tuple(x1.shape[1:]))
    others = x1 if x2 is None else x2
    shape = (len(x1), len(others))
    # For vectors, use a single block: it needs hardly any memory in addition
    # to its result.
    side = max(shape) if len(net.shape) == 1 else None
    nngp = x1.new_empty(shape)
    ntk = x1.new_empty(shape)
    columns = None if x2 is None else len(x2)
    for place in block_slices(net, len(x1), columns, side):
        block = compute(
            net, place, x1, x2, budget=budget, engine=engine, threads=threads
        )
        if block.nngp.shape == shape:
            return InfiniteKernels(block.nngp, block.ntk)
        parts = [block]
        if x2 is None:
            parts.append(block.mirrored)
        for part in parts:
            nngp[part.place.rows, part.place.columns] = part.nngp
            ntk[part.place.rows, part.place.columns] = part.ntk
    return InfiniteKernels(nngp, ntk)


def refuse_unfit(x1: Tensor, x2: Tensor | None) -> None:
    """Raise unless the inputs are finite floating-point tensors
    with equal example shapes."""
    inputs = {"x1": x1}
    if x2 is not None:
        inputs["x2"] = x2
    for name, x in inputs.items():
        refuse_tensor(name, x)
        if x.shape[1:] != x1.shape[1:] or x.dtype != x1.dtype:
            raise Mistake(
                f"x1 has examples of shape {list(x1.shape[1:])} and {x1.dtype}, "
                f"x2 of {list(x.shape[1:])} and {x.dtype}; give both one shape and dtype"
            )
        refuse_numbers(name, x)


def refuse_tensor(name: str, x: Tensor) -> None:
    """Raise unless x is a plain floating-point tensor [example, …]."""
    if not isinstance(x, Tensor):
        raise Mistake(
            f"{name} is a {type(x).__name__}; give a tensor or an array [example, …]"
        )
    if x.is_nested or x.layout is not torch.strided or x.is_meta or x.is_quantized:
        raise Mistake(
            f"{name} is nested, sparse, quantized or without numbers; give a plain tensor "
            "[example, …]"
        )
    if x.dim() < 2 or not x.is_floating_point():
        raise Mistake(
            f"{name} is {x.dtype} of shape {list(x.shape)}; it takes floating numbers [example, …]"
        )


def refuse_numbers(name: str, x: Tensor) -> None:
    """Raise if an entry is not finite, or if an example is so small
    that its squares underflow."""
    # The largest absolute entry of each example.
    # It is not finite if any entry is not finite.
    if x[:1].numel():
        parts = split_portions(x.detach().flatten(1), x[0].numel())
        sizes = torch.cat(
            [torch.maximum(part.amax(1), -part.amin(1)) for part in parts]
        )
    else:
        sizes = x.detach().flatten(1).sum(1)
    infinite = ~sizes.isfinite()
    if infinite.any():
        first = int(infinite.nonzero()[0])
        raise Mistake(
            f"{name} has entries that are not finite, the first in example {first}"
        )
    limits = torch.finfo(sizes.dtype)
    tiny = (sizes > 0) & (sizes < (limits.tiny / limits.eps) ** 0.5)
    if tiny.any():
        first = int(tiny.nonzero()[0])
        raise Mistake(
            f"{name} is so small that its squares lose digits, in example {first}; scale it up"
        )
