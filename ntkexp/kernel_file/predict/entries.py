"""The numbers of a kernel file as matrices: an entry is a point with one of the kernel's outputs.

A kernel with one output holds for every column of the targets alike: one of infinite width, or a trace, of which each
column gets its share. One with as many as they have holds for all columns together, which then follow one another in a
single one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.records.kernel_file.layout import SELF, DamagedKernel
from ntkexp.records.kernel_file.store import KernelMatrix

AT_ONCE = 1 << 27  # bytes of rows that are read at once


@dataclass(frozen=True)
class Entries:
    """One file holds these numbers, in double precision."""

    matrix: KernelMatrix

    def __post_init__(self) -> None:
        if missing := len(self.matrix.missing()):
            whole = len(self.matrix.layout.tiling.todo)
            raise Mistake(
                f"{self.matrix.path} is not finished, or damaged: {whole - missing} of {whole} tiles are there; the "
                "command that began it goes on"
            )
        layout, columns = self.matrix.layout, self.targets.shape[1]
        others = isinstance(self.outputs, list) and self.outputs != list(range(columns))
        if others or layout.outputs not in (1, columns):
            raise WrongArgument(
                f"{self.matrix.path} is of {layout.outputs} outputs, and {columns} are to be predicted in their order; "
                "compute it with outputs=all or outputs=trace",
                "outputs",
            )

    @property
    def outputs(self) -> Any:
        """Which outputs the kernel is of: all, their trace, or a list; an infinite width knows no difference."""
        return self.matrix.description["kernel"].get("outputs", "all")

    @property
    def share(self) -> float:
        """A column gets this part of the kernel."""
        return 1 / self.targets.shape[1] if self.outputs == "trace" else 1.0

    @property
    def train(self) -> int:
        """How many training examples there are."""
        return self.matrix.layout.tiling.train

    @property
    def count(self) -> int:
        """How many entries they make."""
        return self.train * self.matrix.layout.outputs

    @property
    def step(self) -> int:
        """How many points are read at once."""
        return max(1, AT_ONCE // (8 * self.count * self.matrix.layout.outputs))

    def blocks(self, points: slice) -> list[slice]:
        """Cut points into as many as are read at once."""
        return [slice(k, min(k + self.step, points.stop)) for k in range(points.start, points.stop, self.step)]

    def rows(self, kernel: str, points: slice) -> Float[Tensor, "row entry"]:
        """Read the kernel between points and training examples."""
        found = torch.as_tensor(self.matrix.array(kernel, points)).double()
        if not found.isfinite().all():
            raise DamagedKernel(f"{self.matrix.path} is damaged: {kernel} holds numbers that are none; compute it anew")
        return found.mul_(self.share).flatten(2).flatten(0, 1)

    def among(self, kernel: str) -> Float[Tensor, "entry entry"]:
        """Read the kernel between training examples."""
        return torch.cat([self.rows(kernel, block) for block in self.blocks(slice(0, self.train))])

    def own(self, kernel: str, points: slice) -> Float[Tensor, " row"]:
        """Read the kernel between points and themselves."""
        found = torch.as_tensor(self.matrix.array(kernel + SELF, points)).double()
        return self.share * found.diagonal(dim1=1, dim2=2).flatten()

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        """All points have these targets."""
        return torch.as_tensor(self.matrix.array("target"))

    @cached_property
    def labels(self) -> Int[Tensor, " point"]:
        """All points have these classes."""
        return torch.as_tensor(self.matrix.array("label"))

    def columns(self, values: Float[Tensor, "point out"]) -> Float[Tensor, "entry column"]:
        """Arrange values of points as the kernel's matrix takes them."""
        return values if self.matrix.layout.outputs == 1 else values.reshape(-1, 1)

    def values(self, columns: Float[Tensor, "entry column"]) -> Float[Tensor, "point out"]:
        """Arrange columns of the kernel's matrix as values of points."""
        return columns.reshape(-1, self.targets.shape[1])
