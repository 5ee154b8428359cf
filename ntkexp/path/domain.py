"""Where a path is integrated, and how far it leads: the points, the outputs, the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.segment import Segment
from ntkexp.on_disk import zeros_on_disk
from ntkexp.path.points import Points, StepBlock

CONTRIBUTIONS = 3  # axes: [point, out, train]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The points and outputs at which a path is integrated."""

    points: Points
    reads_train: bool  # whether training examples are among the points that are read, as they are among all
    attributed: Int[Tensor, " attributed"]  # those of the points at which the path is integrated
    integrated: tuple[int, ...]  # those of the outputs
    outputs: int
    steps: int  # at most
    switches: tuple[int, ...] = ()  # those at which another phase begins
    chunk: int  # how many attributed points at once, where they take a pass backwards
    like: Tensor  # of the kind of number that kernels are made of
    spills: bool = False  # whether contributions do not fit into the memory
    scratch: Path | None = None  # a folder where they lie then

    @property
    def read(self) -> slice:
        """The points at which the network is read: all, or all but the training examples."""
        return slice(self.first, None)

    @property
    def first(self) -> int:
        """The first of the points that are read."""
        return 0 if self.reads_train else self.points.train

    @property
    def rows(self) -> Int[Tensor, " attributed"]:
        """Where the attributed points lie among those that are read."""
        return self.attributed - self.first

    @property
    def places(self) -> list[slice]:
        """The same, cut into blocks."""
        return (self.points.train_blocks if self.reads_train else []) + self.points.other_blocks

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[point, out, train, out_] of the path kernel, at the points where the network is read."""
        return len(self.points.inputs) - self.first, len(self.integrated), self.points.train, self.outputs

    def kernel_room(self) -> Float[Tensor, "point out train out_"]:
        """Room for a path kernel; without training examples, if none is kept."""
        return self.room(4) if self.points.makes_kernels else self.like.new_zeros(*self.shape[:2], 0, self.outputs)

    def blocks(self, segment: Segment) -> Iterator[StepBlock]:
        """The points that are read, block by block, during a step."""
        return (StepBlock(self.points, segment, place, self.first) for place in self.places)

    def zeros(self, axes: int) -> Float[Tensor, "point out ..."]:
        """Zeros of so many of the axes of the path kernel."""
        return self.zeros_of(axes, self.like.dtype)

    def room(self, axes: int) -> Float[Tensor, "point out ..."]:
        """The same, but NaN at points where the path is not integrated; sums of contributions are taken in float64."""
        room = self.zeros_of(axes, torch.float64 if axes < 4 else self.like.dtype)
        if len(self.rows) < len(room):
            room.fill_(torch.nan)[self.rows] = 0.0
        return room

    def zeros_of(self, axes: int, dtype: torch.dtype) -> Float[Tensor, "point out ..."]:
        """Zeros of a type; contributions of all training examples lie on disk, if they must."""
        if axes == CONTRIBUTIONS and self.scratch is not None:
            return zeros_on_disk(self.scratch, self.shape[:axes], dtype)
        return self.like.new_zeros(self.shape[:axes], dtype=dtype)

    def no_pull(self) -> Float[Tensor, "train out_"]:
        """ℓ′ before the first step is taken."""
        return self.like.new_zeros(self.points.train, self.outputs)
