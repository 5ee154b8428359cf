"""Sets of labelled images, of which some classes are chosen by number.

The classes keep the order in which they are named: of two, the second is the positive one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from jaxtyping import Integer, UInt8
from torch import Tensor

from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.scale import Standardise
from ntkexp.mistake import Mistake

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
