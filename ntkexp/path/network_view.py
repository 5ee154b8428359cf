"""The network at one set of weights: read at all points when that is asked for, and once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.diagnostics.lanczos import largest_eigenvalue
from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.gram import trace
from ntkexp.kernel.read.outputs import chunks
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.sketch.error_bar import error_bar, random_vectors
from ntkexp.path.gradient import summed, total
from ntkexp.path.points import Points
from ntkexp.path.right_side import right_side
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class NetworkView:
    """What is seen at the points with these weights."""

    points: Points
    weights: Weights

    latest: list[tuple[Tensor, list[Features]]] = field(default_factory=list, repr=False)  # ℓ′, and what it pulls

    @cached_property
    def train_reading(self) -> tuple[Float[Tensor, "train out"], list[Features]]:
        """The outputs at the training examples and, where kernels are made, their tangent features."""
        found, right = [], []
        for tape in self.tapes(self.points.train_blocks):
            found.append(tape.outputs)
            if self.points.makes_kernels:
                right.append(self.points.reader.tangent(tape))
        return torch.cat(found), right

    def tapes(self, blocks: Sequence[slice]) -> Iterator[Tape]:
        """One after the other."""
        return (self.points.tape(self.weights, block) for block in blocks)

    @cached_property
    def outputs(self) -> Float[Tensor, "point out"]:
        """f(θ) at all points."""
        return torch.cat([self.train_outputs, *(tape.outputs for tape in self.tapes(self.points.other_blocks))])

    @property
    def train_outputs(self) -> Float[Tensor, "train out"]:
        """f(θ) at the training examples."""
        return self.train_reading[0]

    @property
    def right(self) -> list[Features]:
        """J(θ) at the training examples, block by block."""
        return self.train_reading[1]

    def pulled(self, output_gradient: Float[Tensor, "train out"]) -> Iterable[Features]:
        """J(xᵢ)ᵀℓ′ᵢ of every training example, block by block: of its features, or where none are read, by itself."""
        parts = torch.split(output_gradient, self.points.block)
        if self.points.makes_kernels:
            return (block.weighted(part) for block, part in zip(self.right, parts, strict=True))
        if not self.latest or self.latest[0][0] is not output_gradient:
            tapes = self.tapes(self.points.train_blocks)
            found = [self.points.reader.weighted(*pair) for pair in zip(tapes, parts, strict=True)]
            self.latest[:] = [(output_gradient, found)]
        return self.latest[0][1]

    def sketch_error(self, kernel: Float[Tensor, "train out train out_"]) -> float:
        """How far a sketched kernel among the training examples is from the kernel at most, as a share of it."""
        vectors = random_vectors(kernel.shape[2:], 0, kernel)
        gradients = (total(self.right, vector, self.weights) for vector in vectors)
        pushed = torch.stack([torch.cat([block.applied(each) for block in self.right]) for each in gradients])
        return error_bar(torch.einsum("qcnd,vnd->vqc", kernel, vectors) - pushed) / float(kernel.norm())

    def kept_kernel(self) -> Float[Tensor, "probe kept train kept_"]:
        """What is kept of the tangent kernel: the whole, its trace over outputs, or none."""
        makes = {"all": self.tangent_kernel, "trace": self.tangent_trace, "none": self.no_kernel}
        return makes[self.points.kernels]()

    def no_kernel(self) -> Float[Tensor, "probe out 0 out_"]:
        """A tangent kernel without training examples, where none is kept."""
        points, outputs = self.outputs.shape
        return self.outputs.new_zeros(points, outputs, 0, outputs)

    @cached_property
    def largest(self) -> float:
        """λ_max of the kernel among the training examples, from below, without it: by products with JJᵀ."""
        return self.largest_among(slice(None))

    def largest_among(self, examples: slice) -> float:
        """The same among some of them."""
        inside = torch.zeros_like(self.train_outputs)
        inside[examples] = 1.0
        start = random_vectors(self.train_outputs.shape, 0, self.train_outputs)[0] * inside
        return largest_eigenvalue(lambda vector: self.kernel_times(vector) * inside, start)

    def kernel_times(self, vector: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        """J Jᵀv of the training examples."""
        gradient = summed(self.pulled(vector), self.weights)
        tapes = self.tapes(self.points.train_blocks)
        return torch.cat([self.points.reader.applied(tape, gradient) for tape in tapes])

    def tangent_kernel(self) -> Float[Tensor, "probe out train out_"]:
        """K(θ) between all points and the training examples."""
        side = right_side(self.points.sketch, self.right)
        own = [side.between(block) for block in self.right]
        tapes = (self.points.tape(self.weights, block) for block in self.points.other_blocks)
        return torch.cat(own + [side.between(self.points.reader.tangent(tape)) for tape in tapes])

    def tangent_trace(self) -> Float[Tensor, "probe 1 train 1"]:
        """Σ_c K[x, c, x′, c] between all points and the training examples, a few outputs at a time."""
        first = self.points.tape(self.weights, self.points.train_blocks[0])
        examples, tangent = self.points.train + self.points.block, self.points.reader.tangent
        outputs = chunks(first, examples, first.outputs.shape[1], lambda chosen: tangent(first, chosen))
        return reduce(torch.add, map(self.trace_of, outputs))

    def trace_of(self, outputs: Sequence[int]) -> Float[Tensor, "probe 1 train 1"]:
        """The share of some outputs."""
        tangent = self.points.reader.tangent
        right = [tangent(tape, outputs) for tape in self.tapes(self.points.train_blocks)]
        others = (tangent(tape, outputs) for tape in self.tapes(self.points.other_blocks))
        rows = (torch.cat([trace(block, side) for side in right], dim=2) for block in chain(right, others))
        return torch.cat(list(rows))
