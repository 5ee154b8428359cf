"""The sketched tangent kernel, and when it is worth its while.

Examples are read some at a time, and only their sketches are kept of them all: no Jacobian of all examples, no rows as
long as the weights. For each example and output there are k numbers, and for the error bar gradients of a chunk of the
weights at a time. What was read is kept for it while it fits, else read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Copies, Factored, Rows, zeros
from ntkexp.kernel.features.gram import ParameterChunk, cut
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.batches import KEPT, InTurns
from ntkexp.kernel.read.cost import kernel_operations, row_operations
from ntkexp.kernel.sketch import SLOWER, VECTORS, Sketch, Sketched, error_bar, operations, random_vectors, sketched_gram
from ntkexp.shapes import Weights

GRADIENTS = 2**28  # bytes of the gradients of some weights, along all vectors


class SketchedKernel(NamedTuple):
    """K̂, and how large ‖K̂ − K‖_F is at most, in 99 of 100 cases."""

    kernel: Float[Tensor, "probe out train out_"]
    error_bar: float


def sketched_kernel(left: InTurns, right: InTurns, weights: Weights, size: int, seed: int) -> SketchedKernel:
    """The kernel of two sides, which may be one, and its error bar; `weights` are those that are trained."""
    sketch = Sketch(size, seed, {name: weight.shape for name, weight in weights.items()})
    other = sketch_of(right, sketch)
    one = other if left is right else sketch_of(left, sketch)
    found = sketched_gram(Sketched(one), Sketched(other))
    vectors = random_vectors(other.shape[:2], seed, other)
    missed = torch.einsum("qcnd,vnd->vqc", found, vectors) - products(left, right, vectors, weights)
    return SketchedKernel(found, error_bar(missed))


def sketch_of(side: InTurns, sketch: Sketch) -> Float[Tensor, "example out size"]:
    """J S."""
    return torch.cat([sketch.of(side.jacobian(place).blocks) for place in side.places])


def products(
    left: InTurns, right: InTurns, vectors: Float[Tensor, "vector train out_"], weights: Weights
) -> Float[Tensor, "vector probe out"]:
    """K v = J̄(Jᵀv): by factors where there are few uses, else by gradients multiplied out once for all vectors."""
    if all(has_few_uses(side.jacobian(side.places[0])) for side in (left, right)):
        found = []
        for vector in vectors:
            gradient = {name: zeros(weight) for name, weight in weights.items()}  # Jᵀ v
            for place in right.places:
                for name, part in right.jacobian(place).weighted(vector[place]).total(weights).items():
                    gradient[name].add_(part)
            found.append(torch.cat([left.jacobian(place).applied(gradient) for place in left.places]))
        return torch.stack(found)
    results = vectors.new_zeros(len(vectors), left.examples, vectors.shape[2])
    for some in together(weights, GRADIENTS // (len(vectors) * vectors.element_size())):
        gradients = [vectors.new_zeros(len(vectors), piece.size) for piece in some]
        for group in right.groups:  # V J, for a chunk of the weights
            examples, jacobian = right.together(group)
            for total, piece in zip(gradients, some, strict=True):
                for thin in thin_pieces(jacobian, piece):
                    place = within(thin, piece)
                    total[:, place].addmm_(vectors[:, examples].flatten(1), jacobian.chunk(thin.name, thin.elements))
        for group in left.groups:  # (V J) J̄ᵀ
            examples, jacobian = left.together(group)
            for total, piece in zip(gradients, some, strict=True):
                for thin in thin_pieces(jacobian, piece):
                    share = total[:, within(thin, piece)] @ jacobian.chunk(thin.name, thin.elements).t()
                    results[:, examples] += share.view_as(results[:, examples])
    return results


def thin_pieces(jacobian: Jacobian, piece: ParameterChunk) -> Iterator[ParameterChunk]:
    """A piece of the weights in pieces that stay in caches; none of a weight that was not used."""
    return cut(jacobian, piece.name, piece.elements) if piece.name in jacobian.uses else iter(())


def within(thin: ParameterChunk, piece: ParameterChunk) -> slice:
    """Where a piece lies in a larger one."""
    return slice(thin.elements.start - piece.elements.start, thin.elements.stop - piece.elements.start)


def has_few_uses(some: Jacobian) -> bool:
    """Whether each weight is used about as often as there are vectors, in products alone."""
    return all(isinstance(block, Factored) and block.inputs.shape[1] <= VECTORS for block in some.blocks)


def together(weights: Weights, most: int) -> Iterator[list[ParameterChunk]]:
    """Pieces of all weights, so many elements at a time at most.

    >>> for some in together({"w": torch.ones(5), "b": torch.ones(1)}, 3):
    ...     print([(piece.name, piece.elements) for piece in some])
    [('w', range(0, 3))]
    [('w', range(3, 5)), ('b', range(0, 1))]
    """
    some: list[ParameterChunk] = []
    left = most
    for name, weight in weights.items():
        at = 0
        while at < weight.numel():
            end = min(at + left, weight.numel())
            some.append(ParameterChunk(name, range(at, end)))
            left, at = left - (end - at), end
            if not left:
                yield some
                some, left = [], most
    if some:
        yield some


# --- Whether a sketch is worth its while: what it and its error bar take, against what the exact kernel takes.
#
# Of n rows of P numbers, each a sum of u outer products, and v vectors for the bar, counted in multiplications:
#
#     exact    n u P + n² P/2
#     bar      2 n u P + 2 n v P        beside the sketch itself
#
# so the exact kernel of a few dozen rows takes less than the bar alone. What both read is not in it.


LONG = 1e11  # multiplications of a sketch that are worth a word: a second or two


def remark(some: Jacobian, probe: int, train: int, size: int) -> str | None:
    """What to say of a sketch of so many examples, with as many as `train` or with themselves, which are like some."""
    sketched = sketch_operations(some, probe, train, size)
    held = (probe + train) * some.nbytes / some.examples <= KEPT
    if sketched < LONG or not held or (exact := kernel_operations(some, probe, train)) > sketched:
        return None
    return (
        f"the exact kernel of these {probe + train} examples takes less than this sketch of it, some {exact:.1g} "
        f"multiplications for {sketched:.1g}, and has no error: leave sketch out"
    )


def sketch_operations(some: Jacobian, probe: int, train: int, size: int) -> float:
    """Multiplications of a sketch to so many dimensions, and of its error bar."""
    weights = sum(some.extents.values())
    each = sum(block_operations(block, size) for block in some.blocks)
    made = sum(row_operations(block) for block in some.blocks if isinstance(block, Factored))
    bar = VECTORS * made if has_few_uses(some) else made + VECTORS * some.outputs * weights
    return (probe + train) * each + (probe + (train or probe)) * bar


def block_operations(block: Block, size: int) -> float:
    """Multiplications of the sketch of one use, for an example."""
    match block:
        case Factored():
            return min(operations(block.inputs, block.outputs, size))
        case Copies():
            return SLOWER * block.values[0].numel()
        case Rows():
            return SLOWER * block.rows[0].numel()
