"""The points, outputs and steps of the sums along a path, and arrays of zeros in the
shapes of path kernels 𝒦 and contributions 𝒮."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel import Segment
from ntkexp.on_disk import zeros_on_disk
from ntkexp.path.components import Components
from ntkexp.path.points import Points
from ntkexp.path.step_kernel import StepBlock

CONTRIBUTION_AXES = 3  # [point, out, train]
PATH_KERNEL_AXES = 4  # [point, out, train, out_]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The points and outputs that have path kernels or contributions.

    A run explains the outputs of the network, or a measure of the outputs such as the
    loss. `points` evaluates the network, and `explained` the explained quantity."""

    points: Points
    explained: Points
    # True if training examples also have path kernels or contributions
    sums_train: bool
    attributed: Int[Tensor, " attributed"]  # indices of the points with contributions
    integrated: tuple[int, ...]  # the outputs that have path kernels or contributions
    outputs: int
    steps: int  # maximum number of training steps
    switches: tuple[int, ...] = ()  # the first step of each phase after the first phase
    chunk: int  # number of attributed points per backward pass
    like: Tensor  # a tensor with the dtype and device of kernels
    # the components by which contributions are split
    components: Components = field(default_factory=dict)
    spills: bool = False  # True if the contributions do not fit into memory
    # the folder for contributions that do not fit into memory
    scratch: Path | None = None

    @property
    def summed_points(self) -> slice:
        """The points that have path kernels or contributions,
        as a slice of all points."""
        return slice(self.first_point, None)

    @property
    def first_point(self) -> int:
        if self.sums_train:
            return 0
        return self.points.train

    @property
    def rows(self) -> Int[Tensor, " attributed"]:
        """The rows in the arrays of sums that belong to the attributed points."""
        return self.attributed - self.first_point

    @property
    def block_slices(self) -> list[slice]:
        """The points that have path kernels or contributions, cut into blocks."""
        if self.sums_train:
            return self.points.train_blocks + self.points.other_blocks
        return self.points.other_blocks

    def blocks(self, segment: Segment) -> Iterator[StepBlock]:
        """Yield these blocks of points. Each block evaluates the explained quantity
        along the segment of a step."""
        return (
            StepBlock(self.explained, segment, place, self.first_point)
            for place in self.block_slices
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [point, out, train, out_] of the path kernel."""
        points = len(self.points.inputs) - self.first_point
        return points, len(self.integrated), self.points.train, self.outputs

    def zeros(
        self, axes: int, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "point out ..."]:
        """Return zeros with the first `axes` axes of the path kernel, [point, out,
        train, out_].

        If the folder `scratch` is set, contributions are stored there.
        """
        dtype = dtype or self.like.dtype
        if axes == CONTRIBUTION_AXES and self.scratch is not None:
            return zeros_on_disk(self.scratch, self.shape[:axes], dtype)
        return self.like.new_zeros(self.shape[:axes], dtype=dtype)

    def sums(self, axes: int) -> Float[Tensor, "point out ..."]:
        """Return zeros at the attributed points, and NaN at all others.

        Path kernels have the dtype of kernels. Sums with fewer axes are float64.
        """
        dtype = torch.float64 if axes < PATH_KERNEL_AXES else None
        sums = self.zeros(axes, dtype)
        if len(self.rows) < len(sums):
            sums.fill_(torch.nan)[self.rows] = 0.0
        return sums

    def zero_output_gradient(self) -> Float[Tensor, "train out_"]:
        """Return zeros in the shape of ℓ′, the gradients of the loss
        at the training outputs."""
        return self.like.new_zeros(self.points.train, self.outputs)
