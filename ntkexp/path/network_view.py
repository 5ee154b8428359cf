"""The network at one set of weights: read at all points when that is asked for, and once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.sketch.error_bar import error_bar, random_vectors
from ntkexp.path.gradient import total
from ntkexp.path.points import Points
from ntkexp.path.right_side import right_side
from ntkexp.shapes import Weights

POWERS, SETTLED = 100, 1e-9  # at most so many, until a product changes the length by no more


@dataclass(frozen=True)
class NetworkView:
    """What is seen at the points with these weights."""

    points: Points
    weights: Weights

    @cached_property
    def train_reading(self) -> tuple[Float[Tensor, "train out"], list[Features]]:
        """The outputs at the training examples, and their tangent features."""
        tapes = [self.points.tape(self.weights, block) for block in self.points.train_blocks]
        return torch.cat([tape.outputs for tape in tapes]), [self.points.reader.tangent(tape) for tape in tapes]

    @cached_property
    def outputs(self) -> Float[Tensor, "point out"]:
        """f(θ) at all points."""
        first, _ = self.train_reading
        others = (self.points.tape(self.weights, block).outputs for block in self.points.other_blocks)
        return torch.cat([first, *others])

    @property
    def train_outputs(self) -> Float[Tensor, "train out"]:
        """f(θ) at the training examples."""
        return self.train_reading[0]

    @property
    def right(self) -> list[Features]:
        """J(θ) at the training examples, block by block."""
        return self.train_reading[1]

    def sketch_error(self, kernel: Float[Tensor, "train out train out_"]) -> float:
        """How far a sketched kernel among the training examples is from the kernel at most, as a share of it."""
        vectors = random_vectors(kernel.shape[2:], 0, kernel)
        gradients = (total(self.right, vector, self.weights) for vector in vectors)
        pushed = torch.stack([torch.cat([block.applied(each) for block in self.right]) for each in gradients])
        return error_bar(torch.einsum("qcnd,vnd->vqc", kernel, vectors) - pushed) / float(kernel.norm())

    def no_kernel(self) -> Float[Tensor, "probe out 0 out_"]:
        """A tangent kernel without training examples, where none is kept."""
        points, outputs = self.outputs.shape
        return self.outputs.new_zeros(points, outputs, 0, outputs)

    @cached_property
    def largest(self) -> float:
        """λ_max of the kernel among the training examples, from below, without it: by power iteration with JJᵀ."""
        vector = random_vectors(self.train_outputs.shape, 0, self.train_outputs)[0]
        for _ in range(POWERS):
            if not (length := vector.norm()):
                break
            gradient = total(self.right, vector / length, self.weights)
            vector = torch.cat([block.applied(gradient) for block in self.right])
            if (vector.norm() - length).abs() <= SETTLED * length:
                break
        return float(vector.norm())

    def tangent_kernel(self) -> Float[Tensor, "probe out train out_"]:
        """K(θ) between all points and the training examples."""
        side = right_side(self.points.sketch, self.right)
        own = [side.between(block) for block in self.right]
        tapes = (self.points.tape(self.weights, block) for block in self.points.other_blocks)
        return torch.cat(own + [side.between(self.points.reader.tangent(tape)) for tape in tapes])
