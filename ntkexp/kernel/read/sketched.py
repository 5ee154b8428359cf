"""The sketched tangent kernel: examples are read some at a time, and only their sketches are kept of them all.

No features of all examples, no rows as long as the weights: for each example and output k numbers, and for the error
bar a gradient as long as the weights at a time. What was read is kept for the error bar while it fits, else read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import nothing
from ntkexp.kernel.features.use_by_use import UseByUse
from ntkexp.kernel.record.inputs import examples, part
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.sketch.closing import Sketched, sketched_gram
from ntkexp.kernel.sketch.error_bar import error_bar, random_vectors
from ntkexp.kernel.sketch.sketch import Sketch
from ntkexp.shapes import Inputs, Weights

READ = 0.1e9  # bytes of the values of examples that are read at once
KEPT = 1e9  # bytes of what was read, on either side


class SketchedKernel(NamedTuple):
    """K̂, and how large ‖K̂ − K‖_F is at most, in 99 of 100 cases."""

    kernel: Float[Tensor, "probe out train out_"]
    error_bar: float


@dataclass(frozen=True)
class SketchedPoints:
    """Examples, and how a network is recorded and read at some of them."""

    record: Callable[[Inputs], Tape]
    read: Callable[[Tape], UseByUse]
    inputs: Inputs
    kept: dict[int, UseByUse] = field(default_factory=dict)

    @cached_property
    def places(self) -> list[slice]:
        """Which examples are read at once: as many each time as differ by one at most."""
        count = examples(self.inputs)
        each = self.record(part(self.inputs, slice(0, 2))).bytes_per_example
        turns = -(-count // max(2, int(READ / each)))
        return [slice(count * k // turns, count * (k + 1) // turns) for k in range(turns)]

    def jacobians(self) -> Iterator[tuple[slice, UseByUse]]:
        """The Jacobian of all examples, some at a time."""
        for place in self.places:
            found = self.kept.get(place.start)
            if found is None:
                found = self.read(self.record(part(self.inputs, place)))
            if sum(each.nbytes for each in self.kept.values()) + found.nbytes <= KEPT:
                self.kept[place.start] = found
            yield place, found

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


def sketched_kernel(
    left: SketchedPoints, right: SketchedPoints, weights: Weights, size: int, seed: int
) -> SketchedKernel:
    """The kernel of two sides, which may be one, and its error bar; `weights` are those that are trained."""
    sketch = Sketch(size, seed, {name: weight.shape for name, weight in weights.items()})
    other = right.sketched(sketch)
    one = other if left is right else left.sketched(sketch)
    found = sketched_gram(Sketched(one), Sketched(other))
    vectors = random_vectors(other.shape[:2], seed, other)
    missed = [product(found, vector) - left.applied(right.gradient(vector, weights)) for vector in vectors]
    return SketchedKernel(found, error_bar(torch.stack(missed)))


def product(kernel: Tensor, vector: Float[Tensor, "train out_"]) -> Float[Tensor, "probe out"]:
    """K v."""
    return torch.einsum("qcnd,nd->qc", kernel, vector)
