"""CIFAR-10: colour photographs of 32 × 32 pixels, from a folder with its python or its binary files.

A. Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ntkexp.component import CountOrNone
from ntkexp.data.format import cifar
from ntkexp.data.format.user_path import UserPath
from ntkexp.data.images import AbstractImages, Pictures


class CIFAR10(AbstractImages):
    """Ten classes; the rest of the set is large, so `test` is a number unless it is set to null."""

    names: ClassVar[tuple[str, ...]] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (3, 5)
    path: UserPath

    def files(self) -> tuple[Path, ...]:
        return cifar.batches(self.path)

    def pictures(self) -> Pictures:
        return cifar.pictures(cifar.batches(self.path))
