"""Sets of labelled images, of which some classes are chosen by number."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Integer, UInt8
from torch import Tensor

from ntkexp.component import CountOrNone
from ntkexp.data.base import AbstractSource, Examples, Standardise
from ntkexp.data.format import image
from ntkexp.data.format.user_path import UserPath
from ntkexp.data.table import read_bundled
from ntkexp.mistake import Mistake

# --- Sets of labelled images, of which some classes are chosen by number.
#
# The classes keep the order in which they are named: of two, the second is the positive one.


Pictures = tuple[UInt8[Tensor, "example channel row column"], Integer[Tensor, " example"]]


class AbstractImages(AbstractSource):
    """Pictures hold numbers from 0 to `white`, and each label has a name."""

    names: ClassVar[tuple[str, ...]]
    white: ClassVar[float] = 255.0
    standardise: Standardise = "all"
    classes: tuple[int, ...] | Literal["all"] = "all"

    @abstractmethod
    def pictures(self) -> Pictures:
        """Read all pictures and their labels."""

    def examples(self, generator: torch.Generator) -> Examples:
        chosen = self.chosen()
        pictures, labels = self.pictures()
        if int(labels.max()) >= len(self.names):
            raise Mistake(f"there is a label {int(labels.max())}, and the labels go from 0 to {len(self.names) - 1}")
        position = torch.full((len(self.names),), -1)
        position[list(chosen)] = torch.arange(len(chosen))
        encoded = position[labels.long()]
        kept = encoded >= 0
        return Examples(pictures[kept], encoded[kept], tuple(self.names[k] for k in chosen), self.white)

    def chosen(self) -> tuple[int, ...]:
        """The labels that are kept, each of which has to exist."""
        if self.classes == "all":
            return tuple(range(len(self.names)))
        unknown = [k for k in self.classes if not 0 <= k < len(self.names)]
        if unknown:
            known = ", ".join(str(k) if name == str(k) else f"{k} ({name})" for k, name in enumerate(self.names))
            raise Mistake(f"data.classes={list(self.classes)}: there is no class {unknown[0]}; choose from {known}")
        if len(set(self.classes)) < max(2, len(self.classes)):
            raise Mistake(f"data.classes={list(self.classes)}: name at least two classes, each once, or all")
        return self.classes


class Digits(AbstractImages):
    """Handwritten digits of 8 × 8 pixels with 17 greys, the test part of the UCI set.

    1797 pictures in ten classes, about 180 of each.

    >>> Digits(train=100).split().train.inputs.shape
    torch.Size([100, 1, 8, 8])
    """

    names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    white: ClassVar[float] = 16.0
    classes: tuple[int, ...] | Literal["all"] = (3, 8)

    def pictures(self) -> Pictures:
        greys, labels = read_bundled("digits")
        return greys.to(torch.uint8).reshape(-1, 1, 8, 8), labels.long()


ADVICE = "MNIST's files can be had from storage.googleapis.com/cvdf-datasets/mnist"


class MNIST(AbstractImages):
    """MNIST: handwritten digits of 28 × 28 pixels, as IDX files in a folder; 60,000 of them, the training pair.

    Ten classes; the rest of the set is large, so `test` is a number unless it is set to null.

    Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-based learning applied to document recognition"
    (1998).
    """

    names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    test: CountOrNone | None = 1024
    classes: tuple[int, ...] | Literal["all"] = (3, 8)
    path: UserPath

    def files(self) -> tuple[Path, ...]:
        return image.pair(self.path, ADVICE)

    def pictures(self) -> Pictures:
        return image.idx_pictures(*image.pair(self.path, ADVICE))


DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_ADVICE = (
    "install Debian's package dataset-fashion-mnist, or get the files from github.com/zalandoresearch/fashion-mnist"
)


class FashionMnist(AbstractImages):
    """Fashion-MNIST: clothes of 28 × 28 pixels, as IDX files in a folder; 60,000 of them, the training pair.

    Ten classes; the rest of the set is large, so `test` is a number unless it is set to null.

    Without a path the files of Debian's package dataset-fashion-mnist are read. H. Xiao, K. Rasul and R. Vollgraf,
    "Fashion-MNIST: a novel image dataset for benchmarking" (2017), arXiv:1708.07747.
    """

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
        return image.pair(self.path or DEBIAN, FASHION_MNIST_ADVICE)

    def pictures(self) -> Pictures:
        return image.idx_pictures(*image.pair(self.path or DEBIAN, FASHION_MNIST_ADVICE))


class CIFAR10(AbstractImages):
    """CIFAR-10: colour photographs of 32 × 32 pixels, from a folder with its python or its binary files.

    Ten classes; the rest of the set is large, so `test` is a number unless it is set to null.

    A. Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
    """

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
        return image.batches(self.path)

    def pictures(self) -> Pictures:
        return image.pictures(image.batches(self.path))
