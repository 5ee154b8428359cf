"""MNIST: handwritten digits of 28 × 28 pixels, as IDX files in a folder; 60,000 of them, the training pair.

Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-based learning applied to document recognition" (1998).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ntkexp.component import CountOrNone
from ntkexp.data.format import idx
from ntkexp.data.format.user_path import UserPath
from ntkexp.data.images import AbstractImages, Pictures

ADVICE = "MNIST's files can be had from storage.googleapis.com/cvdf-datasets/mnist"


class MNIST(AbstractImages):
    """Ten classes; the rest of the set is large, so `test` is a number unless it is set to null."""

    names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (3, 8)
    path: UserPath

    def files(self) -> tuple[Path, ...]:
        return idx.pair(self.path, ADVICE)

    def pictures(self) -> Pictures:
        return idx.pictures(*idx.pair(self.path, ADVICE))
