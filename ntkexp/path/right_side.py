"""The right side of kernels: the training examples, as all points are held against them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.sketch.closing import Sketched, sketched_gram
from ntkexp.kernel.sketch.sketch import Sketch
from ntkexp.shapes import Weights


class AbstractRightSide(ABC):
    """Training examples at one set of weights."""

    @abstractmethod
    def between(self, left: Features) -> Float[Tensor, "probe out train out_"]:
        """The kernel between a block of points and all training examples."""


@dataclass(frozen=True)
class ExactSide(AbstractRightSide):
    """Their features, block by block."""

    blocks: Sequence[Features]

    def between(self, left: Features) -> Float[Tensor, "probe out train out_"]:
        found = [gram(left, block) for block in self.blocks]
        return torch.cat(found, dim=2) if len(found) > 1 else found[0]


@dataclass(frozen=True)
class SketchedSide(AbstractRightSide):
    """A sketch of them all, in which a direction may be treated apart: a step along it closes."""

    sketch: Sketch
    sketched: Sketched
    direction: Weights | None
    along: Float[Tensor, " size"] | None  # the sketch of the direction

    def between(self, left: Features) -> Float[Tensor, "probe out train out_"]:
        found = Sketched(self.sketch.of(left.blocks.values()))
        if self.direction is not None and self.along is not None:
            found = found.apart(left.applied(self.direction), self.along)
        return sketched_gram(found, self.sketched)


def right_side(
    sketch: Sketch | None, blocks: Sequence[Features], direction: Weights | None = None
) -> AbstractRightSide:
    """The training examples, sketched if there is a sketch."""
    if sketch is None:
        return ExactSide(blocks)
    found = Sketched(torch.cat([sketch.of(block.blocks.values()) for block in blocks]))
    if direction is None:
        return SketchedSide(sketch, found, None, None)
    along, applied = sketch.of_weights(direction), torch.cat([block.applied(direction) for block in blocks])
    return SketchedSide(sketch, found.apart(applied, along), direction, along)
