"""Fashion-MNIST: clothes of 28 × 28 pixels, as IDX files in a folder; 60,000 of them, the training pair.

Without a path the files of Debian's package dataset-fashion-mnist are read.
H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking" (2017), arXiv:1708.07747.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ntkexp.component import CountOrNone
from ntkexp.data.format import idx
from ntkexp.data.format.user_path import UserPath
from ntkexp.data.images import AbstractImages, Pictures

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
ADVICE = (
    "install Debian's package dataset-fashion-mnist, or get the files from github.com/zalandoresearch/fashion-mnist"
)


class FashionMnist(AbstractImages):
    """Ten classes; the rest of the set is large, so `test` is a number unless it is set to null."""

    names: ClassVar[tuple[str, ...]] = (
        "T-shirt",
        "trousers",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (0, 6)
    path: UserPath | None = None

    def files(self) -> tuple[Path, ...]:
        return idx.pair(self.path or DEBIAN, ADVICE)

    def pictures(self) -> Pictures:
        return idx.pictures(*idx.pair(self.path or DEBIAN, ADVICE))
