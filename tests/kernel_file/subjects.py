"""Kernels whose numbers are known without a file: products of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.kernel_file.fill import ThreadCrew, fill
from ntkexp.kernel_file.filler import AbstractFiller, AbstractRecipe
from ntkexp.kernel_file.tile import Subject
from ntkexp.progress import Silent
from ntkexp.records.kernel_file import KernelMatrix

SIZES = ("data.train=70", "data.probe=30", "data.test=45")  # 32 divides none of them


def filled(path: Path, of: Subject, filler: AbstractFiller, *, workers: int = 1, force: bool = False) -> KernelMatrix:
    """The file, filled by threads."""
    return fill(path, of, filler, ThreadCrew(of, filler, workers), force=force, progress=Silent())


def subject(*overrides: str) -> Subject:
    """Some digits."""
    experiment = compose([*SIZES, *overrides])
    return Subject(experiment, experiment.draw(), {"kind": "products"}, 1)


@dataclass
class Products(AbstractFiller):
    """`nngp`: ⟨x, x′⟩, and `ntk`: ⟨x, x′⟩ + (1 + ⟨x, x′⟩)²; fails once so many tiles were computed."""

    fails_after: float = float("inf")
    seen: list[int] = field(default_factory=list)
    each: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return ("nngp", "ntk")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def kernel(self) -> dict[str, Any]:
        return {"kind": "products"}

    @property
    def concurrent(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return self.each

    def between(self, left: Tensor, right: Tensor) -> Mapping[str, Tensor]:
        if len(self.seen) >= self.fails_after:
            raise KeyboardInterrupt
        self.seen.append(len(left))
        products = products_of(left, right)
        return {"nngp": products[:, None, :, None], "ntk": (products + (1 + products) ** 2)[:, None, :, None]}

    def among(self, points: Tensor) -> Mapping[str, Tensor]:
        return self.between(points, points)


@dataclass(frozen=True)
class ProductsRecipe(AbstractRecipe):
    """The same wherever it is followed."""

    def filler(self, experiment: Experiment, data: Data, workers: int) -> Products:
        return Products()


def products_of(left: Tensor, right: Tensor) -> Tensor:
    """Scaled to be of order one; summed in the same order whatever the number of points."""
    return (left.flatten(1)[:, None] * right.flatten(1)).sum(2) / 64


def whole(found: Subject) -> dict[str, Tensor]:
    """The kernels that a file should hold, [point, train]."""
    blocks = Products().between(found.inputs, found.inputs[: len(found.data.train.inputs)])
    return {name: block[:, 0, :, 0] for name, block in blocks.items()}
