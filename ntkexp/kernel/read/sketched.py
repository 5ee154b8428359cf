"""The sketched tangent kernel: examples are read some at a time, and only their sketches are kept of them all.

No features of all examples, no rows as long as the weights: for each example and output k numbers, and for the error
bar a gradient as long as the weights at a time. What was read is kept for the error bar while it fits, else read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import nothing
from ntkexp.kernel.read.in_turns import InTurns
from ntkexp.kernel.sketch.closing import Sketched, sketched_gram
from ntkexp.kernel.sketch.error_bar import error_bar, random_vectors
from ntkexp.kernel.sketch.sketch import Sketch
from ntkexp.shapes import Weights


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
