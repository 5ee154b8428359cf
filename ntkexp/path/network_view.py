"""The network at one set of weights: read at all points when that is asked for, and once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.path.points import Points, between
from ntkexp.shapes import Weights


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

    def tangent_kernel(self) -> Float[Tensor, "probe out train out_"]:
        """K(θ) between all points and the training examples."""
        own = [between(block, self.right) for block in self.right]
        tapes = (self.points.tape(self.weights, block) for block in self.points.other_blocks)
        return torch.cat(own + [between(self.points.reader.tangent(tape), self.right) for tape in tapes])
