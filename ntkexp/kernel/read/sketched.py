"""The sketched tangent kernel: examples are read some at a time, and only their sketches are kept of them all.

No features of all examples, no rows as long as the weights: for each example and output k numbers, and for the error
bar gradients of a strip of the weights at a time. What was read is kept for it while it fits, else read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.features import nothing
from ntkexp.kernel.features.use_by_use import UseByUse
from ntkexp.kernel.read.in_turns import InTurns
from ntkexp.kernel.sketch.closing import Sketched, sketched_gram
from ntkexp.kernel.sketch.error_bar import VECTORS, error_bar, random_vectors
from ntkexp.kernel.sketch.sketch import Sketch
from ntkexp.shapes import Weights

GRADIENTS = 2**28  # bytes of the gradients of some weights, along all vectors


class SketchedKernel(NamedTuple):
    """K̂, and how large ‖K̂ − K‖_F is at most, in 99 of 100 cases."""

    kernel: Float[Tensor, "probe out train out_"]
    error_bar: float


@dataclass(frozen=True)
class SketchedPoints(InTurns):
    """Examples whose Jacobians are projected and contracted."""

    def sketched(self, sketch: Sketch) -> Float[Tensor, "example out size"]:
        """J S."""
        return torch.cat([sketch.of(found.parts) for _, found in self.jacobians()])

    def gradient(self, vector: Float[Tensor, "example out"], like: Weights) -> Weights:
        """Jᵀ v."""
        total = nothing(like)
        for place, found in self.jacobians():
            found.weighted(vector[place]).add_to(total)
        return total

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return torch.cat([found.applied(weights) for _, found in self.jacobians()])

    @property
    def has_few_uses(self) -> bool:
        """Whether products with vectors are faster by factors than by gradients multiplied out once for all vectors."""
        return has_few_uses(self.jacobian(self.places[0]))


def sketched_kernel(
    left: SketchedPoints, right: SketchedPoints, weights: Weights, size: int, seed: int
) -> SketchedKernel:
    """The kernel of two sides, which may be one, and its error bar; `weights` are those that are trained."""
    sketch = Sketch(size, seed, {name: weight.shape for name, weight in weights.items()})
    other = right.sketched(sketch)
    one = other if left is right else left.sketched(sketch)
    found = sketched_gram(Sketched(one), Sketched(other))
    vectors = random_vectors(other.shape[:2], seed, other)
    missed = torch.einsum("qcnd,vnd->vqc", found, vectors) - products(left, right, vectors, weights)
    return SketchedKernel(found, error_bar(missed))


def products(
    left: SketchedPoints, right: SketchedPoints, vectors: Float[Tensor, "vector train out_"], weights: Weights
) -> Float[Tensor, "vector probe out"]:
    """K v = J̄(Jᵀv)."""
    if left.has_few_uses and right.has_few_uses:
        return torch.stack([left.applied(right.gradient(vector, weights)) for vector in vectors])
    results = vectors.new_zeros(len(vectors), left.examples, vectors.shape[2])
    for some in together(weights, GRADIENTS // (len(vectors) * vectors.element_size())):
        gradients = [vectors.new_zeros(len(vectors), len(place)) for _, place in some]
        for examples, chunks in map(right.chunks, right.groups):
            for gradient, strip in zip(gradients, some, strict=True):
                chunks.add_weighted(gradient, vectors[:, examples].flatten(1), *strip)
        for examples, chunks in map(left.chunks, left.groups):
            for gradient, strip in zip(gradients, some, strict=True):
                results[:, examples] += chunks.applied(gradient, *strip).view_as(results[:, examples])
    return results


def has_few_uses(some: UseByUse) -> bool:
    """Whether each weight is used about as often as there are vectors, in products alone."""
    return all(isinstance(part, Factored) and part.inputs.shape[1] <= VECTORS for part in some.parts)


def together(weights: Weights, most: int) -> Iterator[list[tuple[str, range]]]:
    """Strips of all weights, so many elements at a time at most.

    >>> [list(map(str, some)) for some in together({"w": torch.ones(5), "b": torch.ones(1)}, 3)]
    [["('w', range(0, 3))"], ["('w', range(3, 5))", "('b', range(0, 1))"]]
    """
    some: list[tuple[str, range]] = []
    left = most
    for name, weight in weights.items():
        at = 0
        while at < weight.numel():
            end = min(at + left, weight.numel())
            some.append((name, range(at, end)))
            left, at = left - (end - at), end
            if not left:
                yield some
                some, left = [], most
    if some:
        yield some
